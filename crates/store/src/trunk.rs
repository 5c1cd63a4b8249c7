//! Many extents loaded into one region: the trunk, and every expert when all are resident.
//!
//! The size is known before a byte is read ([`TrunkImage::plan_bytes`]), so that the ledger can
//! refuse first.

use std::sync::Arc;

use forebay_models::Extent;

use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::layout::Layout;
use crate::queue::{self, IoOptions, ReadRequest, Urgency};
use crate::region::Region;

/// Extents closer than this are read as one: skipping less costs more than reading it.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// Loaded extents.
#[derive(Debug)]
pub struct TrunkImage {
    layout: Layout,
    region: Region,
}

impl TrunkImage {
    /// Bytes that [`TrunkImage::load`] will take for these extents.
    pub fn plan_bytes(extents: &[Extent]) -> u64 {
        layout(extents).bytes()
    }

    /// Reads all extents, several reads at once. `progress` is told (bytes read, bytes in all).
    pub fn load(
        files: &Arc<FileSet>,
        extents: &[Extent],
        io: &IoOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<TrunkImage, StoreError> {
        TrunkImage::load_for(files, extents, io, &mut |_| Reader::Trunk, progress)
    }

    /// The same; `reader` tells for whom the byte range of a failed read is.
    pub(crate) fn load_for(
        files: &Arc<FileSet>,
        extents: &[Extent],
        io: &IoOptions,
        reader: &mut dyn FnMut(Extent) -> Reader,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<TrunkImage, StoreError> {
        check_bounds(files, extents)?;
        let layout = layout(extents);
        for file in layout.files() {
            files.check_unchanged(file)?;
        }
        let region = Region::new(layout.bytes() as usize, io.huge_pages)?;
        let reads = layout.reads(io.max_read_bytes);
        let (loan, pieces) = region.lend(reads.iter().map(|read| read.range.clone()));
        let mut queue = queue::open(files, io, 0)?;
        for (i, (read, piece)) in reads.iter().zip(pieces).enumerate() {
            queue.submit(ReadRequest::new(i as u64, read, piece, Urgency::Demanded));
        }
        let mut done = 0;
        progress(done, layout.bytes());
        while let Some(completion) = queue.wait() {
            let read = &reads[completion.tag as usize];
            let extent = Extent { file: read.file, offset: read.offset, len: read.need as u64 };
            completion.result.map_err(|error| error.read_for(reader(extent)))?;
            done += read.range.len() as u64;
            progress(done, layout.bytes());
        }
        let region = loan.reclaim().expect("every piece came back with its completion");
        Ok(TrunkImage { layout, region })
    }

    /// The bytes of an extent that was loaded, or that lies inside one.
    pub fn bytes(&self, extent: Extent) -> &[u8] {
        let place = self.layout.locate(extent);
        &self.region[place.expect("only extents that were loaded are asked for")]
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> u64 {
        self.layout.bytes()
    }
}

fn layout(extents: &[Extent]) -> Layout {
    Layout::cover(extents.iter().copied(), MAX_GAP_BYTES)
}

fn check_bounds(files: &FileSet, extents: &[Extent]) -> Result<(), StoreError> {
    extents.iter().try_for_each(|&extent| in_bounds(files, extent, "trunk"))
}

/// Fails if an extent reaches beyond its file.
pub(crate) fn in_bounds(files: &FileSet, extent: Extent, tensor: &str) -> Result<(), StoreError> {
    let Extent { file, offset, len } = extent;
    let file_len = match (file as usize) < files.len() {
        true => files.entry(file).len,
        false => 0,
    };
    let end = offset.saturating_add(len);
    if (file as usize) < files.len() && end <= file_len {
        return Ok(());
    }
    Err(StoreError::OutOfBounds { tensor: tensor.into(), file, offset, end, file_len })
}
