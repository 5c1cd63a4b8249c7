//! Whether the system is short of memory.
//!
//! Linux tells as pressure stall information
//! (<https://docs.kernel.org/accounting/psi.html>): the share of the last ten seconds in which some
//! task waited for memory. The process's own control group is asked first, then the machine. Where
//! there is none, nothing is known and nothing is done.

use std::fs;
use std::path::{Path, PathBuf};

use crate::memory;

/// A look at the system's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// Percent of the last ten seconds in which some task waited for memory.
    pub some_avg10: Option<f64>,
    /// The smallest limit of the control groups above the process.
    pub limit: Option<u64>,
}

/// Where to look; the process's own system but in tests.
#[derive(Clone, Debug)]
pub struct PressureGauge {
    root: PathBuf,
}

impl Default for PressureGauge {
    fn default() -> Self {
        PressureGauge { root: PathBuf::from("/") }
    }
}

impl PressureGauge {
    /// Looks below another root.
    pub fn below(root: &Path) -> PressureGauge {
        PressureGauge { root: root.into() }
    }

    /// Looks now. A few small files are read.
    pub fn read(&self) -> Pressure {
        let groups = memory::own_groups(&self.root);
        let own = groups.iter().map(|group| group.join("memory.pressure"));
        let machine = self.root.join("proc/pressure/memory");
        let mut files = own.chain([machine]);
        Pressure {
            some_avg10: files.find_map(|file| some_avg10(&fs::read_to_string(file).ok()?)),
            limit: memory::container_memory(&self.root).map(|memory| memory.limit),
        }
    }
}

/// `some avg10=0.12 avg60=... total=...`
fn some_avg10(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|field| field.strip_prefix("avg10=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    const CALM: &str = "some avg10=0.00 avg60=0.10 avg300=0.00 total=3\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=0\n";

    #[test]
    fn the_own_group_comes_before_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let gauge = PressureGauge::below(dir.path());
        assert_eq!(gauge.read(), Pressure::default());
        put(dir.path(), "proc/pressure/memory", CALM);
        assert_eq!(gauge.read().some_avg10, Some(0.0));
        put(dir.path(), "proc/self/cgroup", "0::/app\n");
        put(
            dir.path(),
            "sys/fs/cgroup/app/memory.pressure",
            &CALM.replace("avg10=0.00", "avg10=31.5"),
        );
        put(dir.path(), "sys/fs/cgroup/app/memory.max", "1048576\n");
        assert_eq!(gauge.read(), Pressure { some_avg10: Some(31.5), limit: Some(1 << 20) });
    }
}
