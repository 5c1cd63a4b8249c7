//! A checked view of a weight matrix in memory: format, shape and one strided byte range per plane.
//!
//! [`MatrixView::new`] checks every bound once; kernels trust it afterwards. Bytes may start at any
//! address: nothing here or in a kernel assumes alignment.

use crate::format::Format;

/// One plane: row `r` starts at `r * stride`.
#[derive(Clone, Copy, Debug)]
pub struct PlaneView<'a> {
    /// The bytes; the last row ends at or before the end.
    pub data: &'a [u8],
    /// Distance between the starts of two rows, in bytes. Larger than a row when rows of two matrices alternate.
    pub stride: usize,
}

/// A weight matrix `[rows, cols]` in memory.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    n_planes: usize,
    planes: [PlaneView<'a>; 3],
    row_bytes: [usize; 3],
}

/// Why bytes cannot be seen as a matrix.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatrixError {
    /// `cols` is not a multiple of the block.
    #[error("rows of {cols} weights cannot be made of {format} blocks of {block}")]
    RaggedRow {
        /// Format's name.
        format: String,
        /// Columns asked for.
        cols: usize,
        /// Weights of a block.
        block: usize,
    },
    /// Wrong number of planes.
    #[error("{format} has {expected} planes, found {found}")]
    PlaneCount {
        /// Format's name.
        format: String,
        /// Planes of the format.
        expected: usize,
        /// Planes given.
        found: usize,
    },
    /// A plane is too short.
    #[error("plane {plane} of a {format} matrix needs {needed} bytes, has {found}")]
    PlaneTooShort {
        /// Format's name.
        format: String,
        /// Index of the plane.
        plane: usize,
        /// Bytes needed.
        needed: usize,
        /// Bytes there.
        found: usize,
    },
    /// Rows overlap: the stride is smaller than a row.
    #[error("row stride {stride} is smaller than a row of {row_bytes} bytes")]
    Stride {
        /// Stride given.
        stride: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
}

impl<'a> MatrixView<'a> {
    /// Checks that every row of every plane lies inside its bytes.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        planes: &[PlaneView<'a>],
    ) -> Result<Self, MatrixError> {
        let (layouts, n_planes) = format.layouts();
        let layouts = &layouts[..n_planes];
        if layouts.len() != planes.len() {
            return Err(MatrixError::PlaneCount {
                format: format.name(),
                expected: layouts.len(),
                found: planes.len(),
            });
        }
        let empty = PlaneView { data: &[], stride: 0 };
        let mut view = MatrixView {
            format,
            rows,
            cols,
            n_planes: planes.len(),
            planes: [empty; 3],
            row_bytes: [0; 3],
        };
        for (i, (layout, plane)) in layouts.iter().zip(planes).enumerate() {
            let row_bytes = layout.row_bytes(cols).ok_or_else(|| MatrixError::RaggedRow {
                format: format.name(),
                cols,
                block: format.block_elements(),
            })?;
            if rows > 1 && plane.stride < row_bytes {
                return Err(MatrixError::Stride { stride: plane.stride, row_bytes });
            }
            let needed = match rows {
                0 => 0,
                _ => (rows - 1)
                    .checked_mul(plane.stride)
                    .and_then(|x| x.checked_add(row_bytes))
                    .unwrap_or(usize::MAX),
            };
            if plane.data.len() < needed {
                return Err(MatrixError::PlaneTooShort {
                    format: format.name(),
                    plane: i,
                    needed,
                    found: plane.data.len(),
                });
            }
            view.planes[i] = *plane;
            view.row_bytes[i] = row_bytes;
        }
        Ok(view)
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.format
    }
    /// Rows: the output features.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Columns: the input features.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// Number of planes.
    pub fn n_planes(&self) -> usize {
        self.n_planes
    }
    /// A plane with its stride.
    #[inline(always)]
    pub fn plane(&self, plane: usize) -> PlaneView<'a> {
        self.planes[plane]
    }
    /// Bytes of one row in plane `plane`.
    pub fn row_bytes(&self, plane: usize) -> usize {
        self.row_bytes[plane]
    }
    /// Groups of 256 columns in a row, a shorter last one included.
    pub fn groups(&self) -> usize {
        self.cols.div_ceil(256)
    }
    /// Bytes of group `group` of row `row` in each plane; fewer for a last group of fewer than 256 columns.
    pub fn group(&self, row: usize, group: usize) -> [&'a [u8]; 3] {
        let full = self.format.group_bytes();
        let mut bytes = [&[][..]; 3];
        for (plane, bytes) in bytes.iter_mut().enumerate().take(self.n_planes) {
            let row = self.row(plane, row);
            let start = group * full[plane];
            *bytes = &row[start..row.len().min(start + full[plane])];
        }
        bytes
    }
    /// Bytes of row `row` in plane `plane`.
    #[inline]
    pub fn row(&self, plane: usize, row: usize) -> &'a [u8] {
        assert!(row < self.rows && plane < self.n_planes);
        let p = &self.planes[plane];
        &p.data[row * p.stride..][..self.row_bytes[plane]]
    }
}
