//! Weights from the files to the GPU: read, taken apart ([`crate::layout`]), copied, by several threads at once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use forebay_models::{Extent, WeightRef};
use forebay_quant::{Format, MatrixView, PlaneView, check_scales};
use forebay_store::{FileSet, StoreError};

use crate::args::{Matrix, Ptr};
use crate::driver::Driver;
use crate::error::CudaError;
use crate::layout::{Layout, PLANES};

/// Source bytes of one piece of work.
const PIECE_BYTES: usize = 8 << 20;

/// Why a model could not be brought to the GPU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The files.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A matrix, or the same matrix of all experts of a layer one below the other.
#[derive(Clone, Debug)]
pub(crate) struct Stack<'a> {
    /// All of one format and shape.
    pub parts: Vec<&'a WeightRef>,
    /// Layer in the model, for messages about experts; none for the trunk.
    pub layer: Option<usize>,
}

impl<'a> Stack<'a> {
    pub(crate) fn one(weight: &'a WeightRef) -> Stack<'a> {
        Stack { parts: vec![weight], layer: None }
    }

    /// The layout; an error if the format has no kernels.
    pub(crate) fn layout(&self) -> Result<Layout, CudaError> {
        let w = self.parts[0];
        Layout::of(w.format).ok_or_else(|| CudaError::Format {
            tensor: w.name.to_string(),
            format: w.format.name(),
        })
    }

    fn rows(&self) -> usize {
        self.parts.iter().map(|w| w.rows).sum()
    }

    /// Bytes on the GPU.
    pub(crate) fn bytes(&self) -> Result<u64, CudaError> {
        Ok(self.layout()?.bytes(self.rows(), self.parts[0].cols))
    }
}

/// A matrix with its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub args: Matrix,
    pub variant: u32,
    /// Bytes of one row over all planes.
    pub row_bytes: u64,
}

/// Gives a stack its place from `at` on.
pub(crate) fn place(stack: &Stack<'_>, at: Ptr) -> Result<Placed, CudaError> {
    let layout = stack.layout()?;
    let w = stack.parts[0];
    let sizes = layout.row_bytes(w.cols);
    let mut planes = [0; PLANES];
    let mut next = at;
    for (plane, size) in planes.iter_mut().zip(sizes) {
        *plane = next;
        next += (size as u64 * stack.rows() as u64).next_multiple_of(256);
    }
    let mut table = [0u32; 4];
    for (i, code) in layout.table.iter().enumerate() {
        table[i / 4] |= (*code as u8 as u32) << (8 * (i % 4));
    }
    let [codes, high, scales, supers] = planes;
    let args = Matrix {
        codes,
        high,
        scales,
        supers,
        rows: stack.rows() as u32,
        cols: w.cols as u32,
        blocks: (w.cols / 32) as u32,
        width: layout.width as u32,
        kind: layout.kind as u32,
        shift: layout.shift,
        plus: layout.plus,
        unit: layout.unit,
        table,
    };
    Ok(Placed { args, variant: layout.variant(), row_bytes: sizes.iter().sum::<usize>() as u64 })
}

/// Rows of one part.
struct Piece<'a> {
    weight: &'a WeightRef,
    layout: Layout,
    first: usize,
    rows: usize,
    /// Where the planes of these rows go.
    to: [Ptr; PLANES],
    expert: Option<(usize, u16)>,
}

/// Loads stacks to their places. `progress` is told (bytes read, bytes in all).
pub(crate) fn load(
    driver: &dyn Driver,
    files: &FileSet,
    stacks: &[(Stack<'_>, Placed)],
    threads: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), LoadError> {
    let pieces = pieces(stacks)?;
    let size = |p: &Piece<'_>| p.weight.format.matrix_bytes(p.rows, p.weight.cols).unwrap_or(0);
    let total: u64 = pieces.iter().map(size).sum();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, 16).min(pieces.len().max(1)) {
            let (sender, next, stop, pieces) = (sender.clone(), &next, &stop, &pieces);
            scope.spawn(move || {
                let mut buffers = Buffers::default();
                while !stop.load(Ordering::Relaxed) {
                    let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else {
                        break;
                    };
                    let result = piece.load(driver, files, &mut buffers).map(|()| size(piece));
                    if sender.send(result).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0;
        progress(0, total);
        for result in receiver {
            match result {
                Ok(bytes) => {
                    done += bytes;
                    progress(done, total);
                }
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(())
    })
}

fn pieces<'a>(stacks: &[(Stack<'a>, Placed)]) -> Result<Vec<Piece<'a>>, CudaError> {
    let mut pieces = Vec::new();
    for (stack, placed) in stacks {
        let layout = stack.layout()?;
        let mut above = 0;
        for (i, weight) in stack.parts.iter().enumerate() {
            let sizes = layout.row_bytes(weight.cols);
            let source: u64 = weight.planes.iter().map(|p| p.stride).sum();
            let step = (PIECE_BYTES / (source as usize).max(1)).max(1);
            let mut first = 0;
            while first < weight.rows {
                let rows = step.min(weight.rows - first);
                let a = &placed.args;
                let mut to = [a.codes, a.high, a.scales, a.supers];
                for (to, size) in to.iter_mut().zip(sizes) {
                    *to += ((above + first) * size) as u64;
                }
                let expert = stack.layer.map(|layer| (layer, i as u16));
                pieces.push(Piece { weight, layout, first, rows, to, expert });
                first += rows;
            }
            above += weight.rows;
        }
    }
    Ok(pieces)
}

#[derive(Default)]
struct Buffers {
    planes: [Vec<u8>; 3],
    out: [Vec<u8>; PLANES],
}

impl Piece<'_> {
    fn load(
        &self,
        driver: &dyn Driver,
        files: &FileSet,
        buffers: &mut Buffers,
    ) -> Result<(), LoadError> {
        let (w, n) = (self.weight, self.rows);
        let (layouts, _) = w.format.layouts();
        for ((bytes, plane), layout) in buffers.planes.iter_mut().zip(&w.planes).zip(layouts) {
            let row = layout.row_bytes(w.cols).expect("checked when the model was read") as u64;
            let extent = Extent {
                file: plane.extent.file,
                offset: plane.extent.offset + self.first as u64 * plane.stride,
                len: (n as u64 - 1) * plane.stride + row,
            };
            bytes.resize(extent.len as usize, 0);
            files.read_exact_at(extent, bytes)?;
        }
        let planes: Vec<PlaneView<'_>> = buffers
            .planes
            .iter()
            .zip(&w.planes)
            .map(|(data, p)| PlaneView { data, stride: p.stride as usize })
            .collect();
        let view = MatrixView::new(w.format, n, w.cols, &planes)
            .expect("extents of weights are checked when the model is read");
        if matches!(w.format, Format::Mxfp4 | Format::Mxfp4Split)
            && let (Err(bad), Some((layer, expert))) = (check_scales(&view), self.expert)
        {
            return Err(StoreError::NanScale {
                tensor: w.name.to_string(),
                layer,
                expert,
                row: self.first + bad.row,
                block: bad.block,
            }
            .into());
        }
        for (out, size) in buffers.out.iter_mut().zip(self.layout.row_bytes(w.cols)) {
            out.resize(size * n, 0);
        }
        let [a, b, c, d] = &mut buffers.out;
        self.layout.repack(&view, 0..n, [a, b, c, d]);
        for (out, to) in buffers.out.iter().zip(self.to) {
            if !out.is_empty() {
                driver.write(to, out)?;
            }
        }
        Ok(())
    }
}
