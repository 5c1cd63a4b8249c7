//! Page-aligned anonymous memory that can be lent out piecewise to reads in flight.
//!
//! A [`Region`] is zero until written and costs no memory until touched. To let several reads fill
//! it at once, [`Region::lend`] splits it into disjoint [`Piece`]s that travel with the reads; the
//! [`Loan`] gives the region back once the last piece is gone. So who may write is settled by
//! ownership: nobody can look at a region while a read can still write into it, whether the read is
//! done by a thread or by the kernel on its own.
//!
//! This is one of the crate's four unsafe modules. Its invariants:
//! - R1: `ptr..ptr + len` is one live, readable and writable, initialised allocation, owned by the
//!   `Mapping`, and released only when that drops.
//! - R2: a `Region` holds the only handle of its mapping.
//! - R3: the pieces of one loan are disjoint ranges inside the mapping, and the loan itself never
//!   touches the bytes.

use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use crate::error::StoreError;

/// Offsets, lengths and addresses of direct reads are multiples of this.
pub const ALIGN: usize = 4096;

/// Whether to ask for huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Leave it to the system's default.
    Default,
    /// Ask for them (`MADV_HUGEPAGE` on Linux, nothing elsewhere).
    Advise,
}

/// Owned memory, aligned to pages. Dereferences to its bytes.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

impl Region {
    /// Reserves `len` bytes that read as zero.
    pub fn new(len: usize, huge: HugePages) -> Result<Region, StoreError> {
        let mapping =
            Mapping::new(len).map_err(|source| StoreError::Memory { bytes: len as u64, source })?;
        if huge == HugePages::Advise {
            sys::advise_huge(&mapping);
        }
        Ok(Region { mapping })
    }

    /// Which region this is.
    pub(crate) fn id(&self) -> RegionId {
        self.mapping.id()
    }

    /// Gives the pages inside `range` back to the system; what they hold afterwards is unspecified
    /// (zero on Linux). Pages that are only partly inside keep their contents.
    pub fn discard(&mut self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.mapping.len);
        let page = sys::page_size();
        let start = range.start.next_multiple_of(page);
        let end = match range.end == self.mapping.len {
            true => range.end,
            false => range.end / page * page,
        };
        if start < end {
            sys::discard(&mut self.mapping, start..end);
        }
    }

    /// Makes the system find memory for all of it now, instead of at each page's first touch. What it
    /// holds does not change. Where the system has no such call, nothing happens.
    pub fn populate(&mut self) {
        sys::populate(&mut self.mapping);
    }

    /// Splits the region into pieces for reads in flight. `ranges` must be ascending and disjoint.
    pub fn lend(self, ranges: impl IntoIterator<Item = Range<usize>>) -> (Loan, Vec<Piece>) {
        let mapping = Arc::new(self.mapping);
        let mut end = 0;
        let pieces = ranges
            .into_iter()
            .map(|range| {
                assert!(
                    end <= range.start && range.start <= range.end && range.end <= mapping.len,
                    "pieces must be ascending, disjoint and inside the region"
                );
                end = range.end;
                Piece { mapping: mapping.clone(), range }
            })
            .collect();
        (Loan { mapping }, pieces)
    }
}

impl Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: R1 for the bytes, R2: nobody else can write them.
        unsafe { std::slice::from_raw_parts(self.mapping.ptr.as_ptr(), self.mapping.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: R1 for the bytes, R2 and `&mut self`: nobody else can reach them.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.ptr.as_ptr(), self.mapping.len) }
    }
}

/// The claim on a region whose pieces are with reads in flight.
#[derive(Debug)]
pub struct Loan {
    mapping: Arc<Mapping>,
}

impl Loan {
    /// The region, if every piece is gone; otherwise the loan again.
    pub fn reclaim(self) -> Result<Region, Loan> {
        Arc::try_unwrap(self.mapping)
            .map(|mapping| Region { mapping })
            .map_err(|mapping| Loan { mapping })
    }
}

/// A part of a lent region, to be filled by one read. Dereferences to its bytes.
#[derive(Debug)]
pub struct Piece {
    mapping: Arc<Mapping>,
    range: Range<usize>,
}

impl Deref for Piece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: R1 for the bytes; R3: only this piece reaches this range.
        unsafe {
            let start = self.mapping.ptr.as_ptr().add(self.range.start);
            std::slice::from_raw_parts(start, self.range.len())
        }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: R1 for the bytes; R3 and `&mut self`: only this piece reaches this range.
        unsafe {
            let start = self.mapping.ptr.as_ptr().add(self.range.start);
            std::slice::from_raw_parts_mut(start, self.range.len())
        }
    }
}

impl Piece {
    /// The region that it is part of.
    pub(crate) fn region(&self) -> RegionId {
        self.mapping.id()
    }
}

/// Tells regions apart, also one from an earlier one at the same address.
#[derive(Clone, Debug)]
pub(crate) struct RegionId {
    range: Range<usize>,
    life: Weak<()>,
}

impl RegionId {
    /// Its addresses.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl PartialEq for RegionId {
    fn eq(&self, other: &RegionId) -> bool {
        self.life.ptr_eq(&other.life)
    }
}

#[derive(Debug)]
struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// Its identity: a [`RegionId`] keeps the place from being used for another one.
    life: Arc<()>,
}

// SAFETY: the mapping owns plain bytes (R1); access through it is governed by R2 and R3.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; a shared `Mapping` gives no access to the bytes by itself.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> std::io::Result<Mapping> {
        let life = Arc::new(());
        if len == 0 {
            return Ok(Mapping { ptr: NonNull::dangling(), len, life });
        }
        Ok(Mapping { ptr: sys::allocate(len)?, len, life })
    }

    fn id(&self) -> RegionId {
        let start = self.ptr.as_ptr() as usize;
        RegionId { range: start..start + self.len, life: Arc::downgrade(&self.life) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: R1; `ptr` and `len` are what `allocate` was called with, and this is the end.
            unsafe { sys::free(self.ptr, self.len) }
        }
    }
}

#[cfg(unix)]
mod sys {
    use super::{Mapping, NonNull, Range};
    use rustix::mm::{Advice, MapFlags, ProtFlags};

    pub(super) fn page_size() -> usize {
        rustix::param::page_size()
    }

    pub(super) fn allocate(len: usize) -> std::io::Result<NonNull<u8>> {
        // SAFETY: a fresh private anonymous mapping touches no existing memory.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        NonNull::new(ptr.cast()).ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }

    /// Unmaps.
    ///
    /// # Safety
    /// `ptr` came from `allocate(len)` and is not used afterwards.
    pub(super) unsafe fn free(ptr: NonNull<u8>, len: usize) {
        // SAFETY: the caller's promise. Failure would leak, nothing more.
        let _ = unsafe { rustix::mm::munmap(ptr.as_ptr().cast(), len) };
    }

    pub(super) fn advise_huge(mapping: &Mapping) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if mapping.len > 0 {
            // SAFETY: R1; the advice changes no contents. Kernels without huge pages refuse it.
            let _ = unsafe {
                rustix::mm::madvise(mapping.ptr.as_ptr().cast(), mapping.len, Advice::LinuxHugepage)
            };
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = mapping;
    }

    pub(super) fn populate(mapping: &mut Mapping) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if mapping.len > 0 {
            let advice = Advice::LinuxPopulateWrite;
            // SAFETY: R1; the pages keep their contents. Kernels before 5.14 refuse the advice.
            let _ =
                unsafe { rustix::mm::madvise(mapping.ptr.as_ptr().cast(), mapping.len, advice) };
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = mapping;
    }

    pub(super) fn discard(mapping: &mut Mapping, range: Range<usize>) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let advice = Advice::LinuxDontNeed;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let advice = Advice::DontNeed;
        // SAFETY: R1 and `&mut`: the range lies in our private anonymous mapping and no reference to
        // it is alive; the pages stay mapped and read as initialised bytes.
        let _ = unsafe {
            let start = mapping.ptr.as_ptr().add(range.start);
            rustix::mm::madvise(start.cast(), range.len(), advice)
        };
    }
}

#[cfg(not(unix))]
mod sys {
    use super::{ALIGN, Mapping, NonNull, Range};
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    pub(super) fn page_size() -> usize {
        ALIGN
    }

    pub(super) fn allocate(len: usize) -> std::io::Result<NonNull<u8>> {
        let layout = Layout::from_size_align(len, ALIGN)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        // SAFETY: `len` is not zero (`Mapping::new`).
        NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }

    /// Frees.
    ///
    /// # Safety
    /// `ptr` came from `allocate(len)` and is not used afterwards.
    pub(super) unsafe fn free(ptr: NonNull<u8>, len: usize) {
        let layout = Layout::from_size_align(len, ALIGN).expect("was valid when allocated");
        // SAFETY: the caller's promise.
        unsafe { dealloc(ptr.as_ptr(), layout) }
    }

    pub(super) fn advise_huge(_: &Mapping) {}

    pub(super) fn populate(_: &mut Mapping) {}

    pub(super) fn discard(_: &mut Mapping, _: Range<usize>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_then_written_then_discarded() {
        for len in [0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 5 * ALIGN] {
            let mut region = Region::new(len, HugePages::Advise).unwrap();
            assert_eq!(region.as_ptr() as usize % if len > 0 { ALIGN } else { 1 }, 0);
            assert!(region.iter().all(|&b| b == 0));
            region.populate();
            assert!(region.iter().all(|&b| b == 0));
            region.fill(7);
            region.populate();
            assert!(region.iter().all(|&b| b == 7));
            region.discard(0..len);
            region.fill(9);
            assert!(region.iter().all(|&b| b == 9));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn discard_keeps_pages_partly_inside() {
        let page = sys::page_size();
        let mut region = Region::new(3 * page, HugePages::Default).unwrap();
        region.fill(7);
        region.discard(1..2 * page + 1);
        assert!(region[..page].iter().all(|&b| b == 7));
        assert!(region[page..2 * page].iter().all(|&b| b == 0));
        assert!(region[2 * page..].iter().all(|&b| b == 7));
    }

    #[test]
    fn pieces_are_written_apart_and_come_back() {
        let region = Region::new(3 * ALIGN, HugePages::Default).unwrap();
        let (loan, pieces) = region.lend([0..10, 10..ALIGN, 2 * ALIGN..3 * ALIGN]);
        let loan = loan.reclaim().expect_err("pieces are out");
        let writers: Vec<_> = pieces
            .into_iter()
            .zip(1u8..)
            .map(|(mut piece, mark)| std::thread::spawn(move || piece.fill(mark)))
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        let region = loan.reclaim().expect("all pieces are gone");
        assert!(region[..10].iter().all(|&b| b == 1));
        assert!(region[10..ALIGN].iter().all(|&b| b == 2));
        assert!(region[ALIGN..2 * ALIGN].iter().all(|&b| b == 0));
        assert!(region[2 * ALIGN..].iter().all(|&b| b == 3));
    }

    #[test]
    fn refused_memory_is_an_error() {
        let error = Region::new(isize::MAX as usize, HugePages::Default).unwrap_err();
        assert_eq!(error.class(), "OutOfMemoryBudget");
    }

    #[test]
    #[should_panic(expected = "disjoint")]
    fn overlapping_pieces_are_refused() {
        let region = Region::new(ALIGN, HugePages::Default).unwrap();
        let _ = region.lend([0..10, 9..20]);
    }
}
