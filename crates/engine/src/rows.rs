//! Single rows of weights, read from the file and dequantised: the embedding, and what
//! is looked at before anything is loaded.

use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use forebay_models::{Extent, WeightRef};
use forebay_quant::{MatrixView, PlaneView};
use forebay_store::{FileSet, StoreError};

/// Reads of rows in flight at once: each is small, so a disk that is busy with experts takes as long for one as for a few.
const READERS: usize = 8;
/// Rows that are worth a reader of their own.
const ROWS_EACH: usize = 4;

/// Reads rows of one matrix; keeps the planes of one row.
#[derive(Clone)]
pub(crate) struct RowReader {
    weight: WeightRef,
    row: [Vec<u8>; 3],
}

impl RowReader {
    pub(crate) fn new(weight: WeightRef) -> RowReader {
        let mut row: [Vec<u8>; 3] = Default::default();
        for (row, plane) in row.iter_mut().zip(&weight.planes) {
            *row = vec![0; plane.stride as usize];
        }
        RowReader { weight, row }
    }

    /// Fails if a file of the matrix changed.
    pub(crate) fn check_unchanged(&self, files: &FileSet) -> Result<(), StoreError> {
        self.weight.planes.iter().try_for_each(|plane| files.check_unchanged(plane.extent.file))
    }

    /// Reads the rows `indices` and dequantises them into `out` `[indices.len(), cols]`.
    pub(crate) fn read_all(
        &self,
        files: &FileSet,
        indices: &[u32],
        out: &mut [f32],
    ) -> Result<(), StoreError> {
        let cols = self.weight.cols;
        let parts = indices.chunks(ROWS_EACH).zip(out.chunks_mut(ROWS_EACH * cols));
        let readers = parts.len().min(READERS);
        let parts = Mutex::new(parts);
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let read_parts = |mut reader: RowReader| -> Result<(), StoreError> {
            while let Some((indices, out)) = next() {
                let mut rows = indices.iter().zip(out.chunks_exact_mut(cols));
                rows.try_for_each(|(&index, out)| reader.read(files, index, out))?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            // Where the system gives no thread, those that it gave read all.
            let others: Vec<_> = (1..readers)
                .filter_map(|_| {
                    let reader = self.clone();
                    Builder::new().spawn_scoped(scope, || read_parts(reader)).ok()
                })
                .collect();
            let own = read_parts(self.clone());
            let others = others.into_iter().map(|reader| {
                reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            others.fold(own, Result::and)
        })
    }

    /// Reads row `index` and dequantises it into `out` `[cols]`.
    pub(crate) fn read(
        &mut self,
        files: &FileSet,
        index: u32,
        out: &mut [f32],
    ) -> Result<(), StoreError> {
        let weight = &self.weight;
        for (bytes, plane) in self.row.iter_mut().zip(&weight.planes) {
            let extent = Extent {
                file: plane.extent.file,
                offset: plane.extent.offset + index as u64 * plane.stride,
                len: plane.stride,
            };
            files.read_exact_at(extent, bytes)?;
        }
        let planes: Vec<PlaneView<'_>> = self.row[..weight.planes.len()]
            .iter()
            .map(|bytes| PlaneView { data: bytes, stride: bytes.len() })
            .collect();
        let view = MatrixView::new(weight.format, 1, weight.cols, &planes)
            .expect("a row is as long as its stride");
        forebay_quant::dequantize_row(&view, 0, out);
        Ok(())
    }
}
