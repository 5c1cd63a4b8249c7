//! The allocator's habits in a process that serves for days.
//!
//! This is one of the crate's four unsafe modules, and makes two calls of the C library, on Linux with glibc:
//! there, every thread that allocates gets an arena of its own, and what a thread frees stays in its arena. A
//! server whose helper threads each once encode a long text then keeps the sum of all their peaks. Two arenas,
//! and large blocks by `mmap` whatever was freed before, keep memory at the peak of what is really in use.
//!
//! Not here: what is allocated. Other allocators are left alone.

/// Blocks from this size on are mapped, and given back when they are freed. The largest that a step makes
/// anew are copies of logits, which are smaller.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_FROM: libc::c_int = 2 << 20;
/// Free bytes at an arena's end that are kept.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: libc::c_int = 4 << 20;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS: libc::c_int = 2;

/// Makes the allocator give back what is free at the ends of arenas. To be called before threads are started: those that have an
/// arena keep it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub fn settle() {
    let habits = [
        (libc::M_ARENA_MAX, ARENAS),
        (libc::M_MMAP_THRESHOLD, MAPPED_FROM),
        (libc::M_TRIM_THRESHOLD, KEPT),
    ];
    for (parameter, value) in habits {
        // SAFETY: `mallopt` takes two integers, touches nothing of ours, and may be called at any time; one
        // that it does not know is refused, and the habit stays as it was.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Elsewhere, the allocator is left as it is.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn settle() {}

/// Gives back the pages that are free in the middle of arenas, which [`settle`] does not reach. Takes about a
/// millisecond for each 100 MB, in which others that allocate may wait: for quiet moments.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub fn give_back() {
    // SAFETY: `malloc_trim` takes an integer, may be called at any time, and touches only memory that is free.
    unsafe { libc::malloc_trim(0) };
}

/// Elsewhere, the allocator is left as it is.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn give_back() {}
