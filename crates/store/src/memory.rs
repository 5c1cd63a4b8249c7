//! How much memory this process has of its own, and how much it may have.
//!
//! *Own* is anonymous and shared memory. Pages of mapped files are not own: the system takes them
//! back when it likes, so they must never make a budget guard act (and `VmHWM`, which contains them,
//! is of no use). The limit is that of the control groups above the process, with inactive page cache
//! counted as free, and what the host has left; the smallest applies. Paths are taken below a root
//! directory, `/` outside tests. Where there is no `/proc`, everything here is `None`.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Anonymous and shared memory of this process that is in RAM.
pub fn own_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some(kib_field(&status, "RssAnon:")? + kib_field(&status, "RssShmem:").unwrap_or(0))
}

/// Pages of mapped files of this process that are in RAM.
pub fn mapped_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "RssFile:")
}

/// `MemAvailable` of the host.
pub fn host_available(root: &Path) -> Option<u64> {
    kib_field(&fs::read_to_string(root.join("proc/meminfo")).ok()?, "MemAvailable:")
}

/// Bytes that this process may still take: the smaller of what the host has left and what the
/// control groups allow.
pub fn usable_bytes(root: &Path) -> Option<u64> {
    let container = container_memory(root).map(|memory| memory.usable);
    match (container, host_available(root)) {
        (Some(container), Some(host)) => Some(container.min(host)),
        (container, host) => container.or(host),
    }
}

/// What the control groups above this process allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerMemory {
    /// The smallest limit on the path to the root.
    pub limit: u64,
    /// Bytes left below the tightest group's limit, inactive page cache counted as free.
    pub usable: u64,
}

/// The control groups' limits, if any group has one.
pub fn container_memory(root: &Path) -> Option<ContainerMemory> {
    let mut tightest: Option<ContainerMemory> = None;
    for (names, groups) in hierarchies(root) {
        // A group's usage is at least that of the groups below it.
        let mut used = 0;
        for group in groups {
            used = used.max(used_bytes(names, &group).unwrap_or(0));
            let Some(limit) = number(&group.join(names.limit)).filter(|&n| n < NO_LIMIT) else {
                continue;
            };
            let usable = limit.saturating_sub(used);
            tightest = Some(match tightest {
                None => ContainerMemory { limit, usable },
                Some(t) => {
                    ContainerMemory { limit: t.limit.min(limit), usable: t.usable.min(usable) }
                }
            });
        }
    }
    tightest
}

/// The most memory that this process's control group ever used, page cache included.
pub fn container_peak(root: &Path) -> Option<u64> {
    hierarchies(root)
        .into_iter()
        .find_map(|(names, groups)| groups.iter().find_map(|group| number(&group.join(names.peak))))
}

/// Directories of this process's control groups of version 2, innermost first.
pub(crate) fn own_groups(root: &Path) -> Vec<PathBuf> {
    let v2 = hierarchies(root).into_iter().filter(|(names, _)| names.limit == V2.limit);
    v2.flat_map(|(_, groups)| groups).collect()
}

/// File names of one version of control groups.
#[derive(Clone, Copy)]
struct Names {
    limit: &'static str,
    current: &'static str,
    peak: &'static str,
    /// Fields of `memory.stat`, the first that exists counts.
    inactive_file: [&'static str; 2],
}

const V2: Names = Names {
    limit: "memory.max",
    current: "memory.current",
    peak: "memory.peak",
    inactive_file: ["inactive_file", "inactive_file"],
};

const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    current: "memory.usage_in_bytes",
    peak: "memory.max_usage_in_bytes",
    inactive_file: ["total_inactive_file", "inactive_file"],
};

/// Version 1 writes "no limit" as the largest number of pages.
const NO_LIMIT: u64 = 1 << 60;

/// For each hierarchy that may govern memory: the directories of this process's group and of all
/// above it, innermost first.
fn hierarchies(root: &Path) -> Vec<(Names, Vec<PathBuf>)> {
    let Ok(text) = fs::read_to_string(root.join("proc/self/cgroup")) else { return Vec::new() };
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if controllers.split(',').any(|controller| controller == "memory") {
            found.push((V1, groups(&root.join("sys/fs/cgroup/memory"), path)));
        } else if id == "0" && controllers.is_empty() {
            found.push((V2, groups(&root.join("sys/fs/cgroup"), path)));
        }
    }
    found
}

/// `mount/a/b`, `mount/a`, `mount`. Inside a container the path may be the host's; directories that
/// are not there count for nothing, and the mount point is then the container's own group.
fn groups(mount: &Path, path: &str) -> Vec<PathBuf> {
    let mut group = mount.to_path_buf();
    let mut groups = vec![group.clone()];
    for part in Path::new(path).components() {
        if let Component::Normal(name) = part {
            group.push(name);
            groups.push(group.clone());
        }
    }
    groups.reverse();
    groups
}

fn used_bytes(names: Names, group: &Path) -> Option<u64> {
    let current = number(&group.join(names.current))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| {
        stat.lines().find_map(|line| {
            let (key, value) = line.split_once(' ')?;
            (key == name).then(|| value.trim().parse::<u64>().ok())?
        })
    };
    let [first, second] = names.inactive_file;
    let inactive = field(first).or_else(|| field(second)).unwrap_or(0);
    Some(current.saturating_sub(inactive))
}

/// A file that holds one number; `max` is none.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// `Name:   123 kB` as bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Follows [`own_bytes`] every 10 ms from its own thread and keeps the peak.
#[derive(Debug)]
pub struct PeakSampler {
    shared: Arc<Sampled>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Sampled {
    peak: AtomicU64,
    stop: AtomicBool,
}

impl PeakSampler {
    /// Starts sampling; none where own memory is not known.
    pub fn start() -> Option<PeakSampler> {
        let shared = Arc::new(Sampled::default());
        shared.peak.store(own_bytes()?, Ordering::Relaxed);
        let sampled = shared.clone();
        let thread = std::thread::Builder::new()
            .name("memory-peak".into())
            .spawn(move || {
                while !sampled.stop.load(Ordering::Relaxed) {
                    std::thread::park_timeout(Duration::from_millis(10));
                    sampled.sample();
                }
            })
            .ok()?;
        Some(PeakSampler { shared, thread: Some(thread) })
    }

    /// The peak so far, this moment included.
    pub fn peak_bytes(&self) -> u64 {
        self.shared.sample();
        self.shared.peak.load(Ordering::Relaxed)
    }
}

impl Sampled {
    fn sample(&self) {
        self.peak.fetch_max(own_bytes().unwrap_or(0), Ordering::Relaxed);
    }
}

impl Drop for PeakSampler {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread has nothing to say.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A root directory with the given files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let host = ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable:   62914560 kB\n");
        for (path, text) in files.iter().chain([&host]) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const STAT: &str = "anon 900000000\ninactive_file 6500000000\nactive_file 500000000\n";

    /// Case D01.
    #[test]
    fn limits_of_containers() {
        let v2 = "0::/a/b\n";
        let own = [
            ("proc/self/cgroup", v2),
            ("sys/fs/cgroup/a/b/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/a/b/memory.current", "8000000000\n"),
            ("sys/fs/cgroup/a/b/memory.stat", STAT),
        ];
        let no_limit = [own[0], ("sys/fs/cgroup/a/b/memory.max", "max\n"), own[2], own[3]];
        let parent =
            [own[0], own[1], own[2], own[3], ("sys/fs/cgroup/a/memory.max", "4294967296\n")];
        let namespace = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/memory.current", "8000000000\n"),
            ("sys/fs/cgroup/memory.stat", STAT),
        ];
        let v1 = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/c\n0::/\n"),
            ("sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes", "8589934592\n"),
            ("sys/fs/cgroup/memory/docker/c/memory.usage_in_bytes", "8000000000\n"),
            (
                "sys/fs/cgroup/memory/docker/c/memory.stat",
                "inactive_file 1\ntotal_inactive_file 6500000000\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "20000000000\n"),
        ];
        // The path is the host's, the mount is the container's own group.
        let v1_inside = [
            v1[0],
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "8589934592\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "8000000000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 6500000000\n"),
        ];
        let over = [own[0], ("sys/fs/cgroup/a/b/memory.max", "1000\n"), own[2], own[3]];
        type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], Option<u64>, u64);
        let cases: [Case; 9] = [
            ("own group", &own, Some(8 * GIB), 7_089_934_592),
            ("max", &no_limit, None, 60 * GIB),
            ("parent has half", &parent, Some(4 * GIB), 4 * GIB - 1_500_000_000),
            ("cgroup namespace", &namespace, Some(8 * GIB), 7_089_934_592),
            ("version 1", &v1, Some(8 * GIB), 7_089_934_592),
            ("version 1 inside", &v1_inside, Some(8 * GIB), 7_089_934_592),
            ("no groups", &[], None, 60 * GIB),
            ("already over", &over, Some(1000), 0),
            ("odd path", &[("proc/self/cgroup", "0::/../../x\nnonsense\n")], None, 60 * GIB),
        ];
        for (name, files, limit, usable) in cases {
            let root = tree(files);
            assert_eq!(container_memory(root.path()).map(|m| m.limit), limit, "{name}");
            assert_eq!(usable_bytes(root.path()), Some(usable), "{name}");
        }
        let nothing = tempfile::tempdir().unwrap();
        assert_eq!(usable_bytes(nothing.path()), None);
    }

    #[test]
    fn peaks_of_containers() {
        let v2 = [("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/memory.peak", "123\n")];
        let v1 = [
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("sys/fs/cgroup/memory/memory.max_usage_in_bytes", "456\n"),
        ];
        assert_eq!(container_peak(tree(&v2).path()), Some(123));
        assert_eq!(container_peak(tree(&v1).path()), Some(456));
        assert_eq!(container_peak(tree(&[]).path()), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_sampler_sees_what_is_gone_again() {
        let sampler = PeakSampler::start().unwrap();
        let before = sampler.peak_bytes();
        let mut region = crate::Region::new(64 << 20, crate::region::HugePages::Default).unwrap();
        region.fill(1);
        sampler.shared.sample();
        drop(region);
        assert!(sampler.peak_bytes() >= before.max(64 << 20));
    }
}
