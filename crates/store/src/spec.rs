//! What a store holds: the routed experts of every MoE layer and where their bytes lie.

use forebay_models::{ExpertWeights, Extent, WeightRef};
use forebay_quant::{BadScale, MatrixError, MatrixView, PlaneView, check_scales};

use crate::ExpertView;
use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::layout::Layout;
use crate::region::ALIGN;
use crate::trunk::in_bounds;

/// The routed experts of a model.
#[derive(Clone, Debug, Default)]
pub struct StoreSpec {
    /// One entry per MoE layer, in order.
    pub layers: Vec<LayerExperts>,
}

/// The routed experts of one layer.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    /// Layer of the model, for messages.
    pub layer: usize,
    /// Experts, in the router's order.
    pub experts: Vec<ExpertWeights>,
}

impl StoreSpec {
    /// Bytes of a slot: the largest expert as it lies in memory, a multiple of 4096.
    pub fn slot_bytes(&self) -> u64 {
        self.all().map(|(_, _, weights)| expert_layout(weights).bytes()).max().unwrap_or(0)
    }

    /// Bytes of all experts, as they lie in a slot each.
    pub fn total_bytes(&self) -> u64 {
        self.all().map(|(_, _, weights)| expert_layout(weights).bytes()).sum()
    }

    /// Bytes of memory that [`crate::Residency::Resident`] takes.
    pub fn resident_bytes(&self) -> u64 {
        crate::TrunkImage::plan_bytes(&self.extents())
    }

    /// The file of the first expert, and the mean bytes of a read of it, none longer than `max_read`.
    pub fn read_shape(&self, max_read: u64) -> Option<(u32, usize)> {
        let (_, _, weights) = self.all().next()?;
        let reads = expert_layout(weights).reads(max_read);
        let bytes: usize = reads.iter().map(|read| read.need).sum();
        Some((reads.first()?.file, bytes / reads.len()))
    }

    /// Experts of all layers together.
    pub fn n_experts_total(&self) -> usize {
        self.layers.iter().map(|layer| layer.experts.len()).sum()
    }

    /// For whom a range of a file is read: the first expert that lies in it.
    pub(crate) fn reader_of(&self, range: Extent) -> Reader {
        let touches = |e: &Extent| {
            e.file == range.file
                && e.offset < range.offset + range.len
                && range.offset < e.offset + e.len
        };
        self.all()
            .find(|(_, _, weights)| expert_extents(weights).any(|e| touches(&e)))
            .map_or(Reader::Range, |(layer, expert, _)| Reader::Expert { layer, expert })
    }

    pub(crate) fn extents(&self) -> Vec<Extent> {
        self.all().flat_map(|(_, _, weights)| expert_extents(weights)).collect()
    }

    /// Checks that every matrix lies in its file and is as large as its shape says, so that
    /// [`expert_view`] cannot fail later.
    pub(crate) fn check(&self, files: &FileSet) -> Result<(), StoreError> {
        for layer in &self.layers {
            assert!(layer.experts.len() <= 1 << 16, "experts are numbered in 16 bits");
        }
        for (_, _, weights) in self.all() {
            for weight in matrices(weights) {
                for plane in &weight.planes {
                    in_bounds(files, plane.extent, &weight.name)?;
                }
                check_shape(weight).map_err(|source| StoreError::Matrix {
                    tensor: weight.name.to_string(),
                    source,
                })?;
            }
        }
        Ok(())
    }

    /// (model layer, expert, weights) of every expert.
    fn all(&self) -> impl Iterator<Item = (usize, u16, &ExpertWeights)> {
        self.layers.iter().flat_map(|layer| {
            layer.experts.iter().enumerate().map(|(i, weights)| (layer.layer, i as u16, weights))
        })
    }
}

/// How one expert lies in a slot.
pub(crate) fn expert_layout(weights: &ExpertWeights) -> Layout {
    Layout::cover(expert_extents(weights), ALIGN as u64)
}

pub(crate) fn expert_extents(weights: &ExpertWeights) -> impl Iterator<Item = Extent> {
    matrices(weights).into_iter().flat_map(|m| m.planes.iter().map(|plane| plane.extent))
}

/// One expert's matrices; `bytes` gives the bytes of an extent. The spec was checked.
pub(crate) fn expert_view<'a>(
    weights: &ExpertWeights,
    bytes: impl Fn(Extent) -> &'a [u8],
) -> ExpertView<'a> {
    let view = |weight: &WeightRef| {
        let mut planes = [PlaneView { data: &[], stride: 0 }; 3];
        for (view, plane) in planes.iter_mut().zip(&weight.planes) {
            *view = PlaneView { data: bytes(plane.extent), stride: plane.stride as usize };
        }
        let planes = &planes[..weight.planes.len()];
        MatrixView::new(weight.format, weight.rows, weight.cols, planes)
            .expect("shapes were checked when the store was opened")
    };
    ExpertView { gate: view(&weights.gate), up: view(&weights.up), down: view(&weights.down) }
}

/// Fails if an MXFP4 scale of the expert is NaN: one such byte would poison every later token.
pub(crate) fn check_expert_scales<'a>(
    weights: &ExpertWeights,
    bytes: impl Fn(Extent) -> &'a [u8],
    layer: usize,
    expert: u16,
) -> Result<(), StoreError> {
    let view = expert_view(weights, bytes);
    for (weight, view) in matrices(weights).into_iter().zip([view.gate, view.up, view.down]) {
        check_scales(&view).map_err(|BadScale { row, block, .. }| StoreError::NanScale {
            tensor: weight.name.to_string(),
            layer,
            expert,
            row,
            block,
        })?;
    }
    Ok(())
}

fn matrices(weights: &ExpertWeights) -> [&WeightRef; 3] {
    [&weights.gate, &weights.up, &weights.down]
}

/// What [`MatrixView::new`] checks, before there are bytes.
fn check_shape(weight: &WeightRef) -> Result<(), MatrixError> {
    let WeightRef { format, rows, cols, planes, .. } = weight;
    let layouts = format.planes();
    if layouts.len() != planes.len() {
        let (expected, found) = (layouts.len(), planes.len());
        return Err(MatrixError::PlaneCount { format: format.name(), expected, found });
    }
    for (i, (layout, plane)) in layouts.iter().zip(planes).enumerate() {
        let row_bytes = layout.row_bytes(*cols).ok_or_else(|| MatrixError::RaggedRow {
            format: format.name(),
            cols: *cols,
            block: format.block_elements(),
        })?;
        let stride = usize::try_from(plane.stride).unwrap_or(usize::MAX);
        if *rows > 1 && stride < row_bytes {
            return Err(MatrixError::Stride { stride, row_bytes });
        }
        let needed = match rows {
            0 => 0,
            _ => (rows - 1).saturating_mul(stride).saturating_add(row_bytes),
        };
        let found = usize::try_from(plane.extent.len).unwrap_or(usize::MAX);
        if found < needed {
            return Err(MatrixError::PlaneTooShort {
                format: format.name(),
                plane: i,
                needed,
                found,
            });
        }
    }
    Ok(())
}
