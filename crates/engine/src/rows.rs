//! Single rows of weights, read from the file and dequantised: the embedding, and what
//! is looked at before anything is loaded.

use forebay_models::{Extent, WeightRef};
use forebay_quant::{MatrixView, PlaneView};
use forebay_store::{FileSet, StoreError};

/// Reads rows of one matrix; keeps the planes of one row.
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
