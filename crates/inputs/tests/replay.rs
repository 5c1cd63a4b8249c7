//! Every input that fuzzing kept, through the entries it was found with: none panics, none takes memory out of
//! proportion to the files it stands for.
//!
//! What is allowed: the target's constant, and [`PER_BYTE`] for each byte of the input's files. It is measured, not estimated: every allocation of this process
//! goes through a counter.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use forebay_inputs::{TARGETS, Target};

const PER_BYTE: u64 = 64;

/// Counts what is allocated now, and the most since [`Counting::restart`].
struct Counting {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Counting {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        self.most.fetch_max(now, Relaxed);
    }

    fn restart(&self) -> usize {
        let now = self.now.load(Relaxed);
        self.most.store(now, Relaxed);
        now
    }
}

// SAFETY: every call is passed on to the system's allocator as it came; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's promises hold for the system's allocator too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting { now: AtomicUsize::new(0), most: AtomicUsize::new(0) };

/// Allocations of one test would count for another: there is one.
#[test]
fn every_corpus() {
    // What one input takes: a number or two of them must fail, or the measure measures nothing.
    assert!(
        peak(Target { name: "", base_bytes: 0, run: |_| vec![1u8; 1 << 20].len() as u64 }, &[]).0
            >= 1 << 20
    );
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let mut failures = Vec::new();
    for target in TARGETS {
        let inputs = files(&corpus.join(target.name));
        assert!(inputs.len() >= 5, "the corpus of {} has {} inputs", target.name, inputs.len());
        let mut worst = (0.0, PathBuf::new());
        for path in inputs {
            let bytes = fs::read(&path).expect("is readable");
            println!("{}", path.display());
            let (most, stands_for) = peak(*target, &bytes);
            let allowed = target.base_bytes + PER_BYTE * stands_for;
            if most > allowed {
                failures.push(format!("{}: {most} bytes, {allowed} allowed", path.display()));
            }
            let share = most as f64 / allowed as f64;
            if share > worst.0 {
                worst = (share, path);
            }
        }
        println!(
            "{}: at most {:.3} of what is allowed, {}",
            target.name,
            worst.0,
            worst.1.display()
        );
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// The most that one input takes, and the bytes it stands for.
fn peak(target: Target, bytes: &[u8]) -> (u64, u64) {
    let before = COUNTING.restart();
    let stands_for = (target.run)(bytes);
    ((COUNTING.most.load(Relaxed) - before) as u64, stands_for)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|e| e.expect("is listed").path()).collect();
    files.sort();
    files
}
