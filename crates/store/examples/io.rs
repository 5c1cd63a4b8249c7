//! Engines of reads on a file: the table of the design note on reads.
//!
//! ```text
//! cargo run --release -p forebay-store --example io -- FILE [SECONDS]
//! ```
//! Random aligned reads, other places in every run; bytes per second, and the processor time of the
//! whole process per gigabyte (from /proc, so on Linux only).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_store::bandwidth::measure_with;
use forebay_store::io::entry_of;
use forebay_store::{FileSet, IoEngine, IoMode, IoOptions, QueueDepth};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("a file");
    let seconds = args.next().map_or(2.0, |s| s.parse().expect("seconds"));
    let entry = entry_of(Path::new(&path)).expect("a file that can be opened");
    let files = Arc::new(FileSet::open(&[entry], IoMode::Auto).expect("the same"));
    let fixed = [1, 2, 4, 8, 16].map(QueueDepth::Fixed);
    println!("{:>10}  {:<10} {:<8} {:>8} {:>10}", "block", "depth", "engine", "GB/s", "cpu ms/GB");
    for block in [1 << 20, 4505 << 10] {
        for depth in fixed.into_iter().chain([QueueDepth::Measured]) {
            for engine in [IoEngine::Threads, IoEngine::Uring] {
                let options = IoOptions { engine, depth, ..IoOptions::default() };
                let (before, duration) = (cpu_seconds(), Duration::from_secs_f64(seconds));
                match measure_with(&files, 0, block, &options, duration) {
                    Ok(found) => {
                        let cpu = cpu_seconds().zip(before).map(|(after, before)| after - before);
                        let gigabytes = found.bytes as f64 / 1e9;
                        println!(
                            "{:>6} KiB  {:<10} {:<8} {:>8.2} {:>10.1}",
                            block >> 10,
                            format!("{depth:?}"),
                            format!("{engine:?}"),
                            found.bytes_per_second() / 1e9,
                            cpu.map_or(f64::NAN, |cpu| cpu * 1e3 / gigabytes),
                        );
                    }
                    Err(error) => println!("{engine:?}: {error}"),
                }
            }
        }
    }
    files.notes().iter().for_each(|note| println!("note: {note}"));
}

/// User and system time of this process, in hundredths of a second.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields = stat.rsplit(')').next()?;
    let mut times = fields.split_whitespace().skip(11);
    let ticks = times.next()?.parse::<f64>().ok()? + times.next()?.parse::<f64>().ok()?;
    Some(ticks / 100.0)
}
