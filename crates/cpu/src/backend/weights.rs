//! Stored weights as kernels take them: views of the trunk, and vectors as numbers.

use forebay_models::{Extent, VectorRef, WeightRef};
use forebay_program::{Program, Vector, VectorForm};
use forebay_quant::{MatrixView, PlaneView};
use forebay_store::{FileSet, StoreError, TrunkImage};

use crate::vecmath;

pub(super) fn trunk_extents(program: &Program) -> Vec<Extent> {
    extents(&program.weights)
}

pub(super) fn extents(weights: &[WeightRef]) -> Vec<Extent> {
    weights.iter().flat_map(|w| w.planes.iter().map(|p| p.extent)).collect()
}

pub(super) fn weight_view<'a>(trunk: &'a TrunkImage, w: &WeightRef) -> MatrixView<'a> {
    let mut planes = [PlaneView { data: &[], stride: 0 }; 3];
    for (view, p) in planes.iter_mut().zip(&w.planes) {
        *view = PlaneView { data: trunk.bytes(p.extent), stride: p.stride as usize };
    }
    MatrixView::new(w.format, w.rows, w.cols, &planes[..w.planes.len()])
        .expect("extents of weights are checked when the model is read")
}

pub(super) fn view_bytes(m: &MatrixView<'_>) -> u64 {
    m.format().matrix_bytes(m.rows(), m.cols()).unwrap_or(0)
}

/// Reads a stored vector as f32.
pub fn read_vector(files: &FileSet, v: &VectorRef) -> Result<Vec<f32>, StoreError> {
    let mut bytes = vec![0; v.extent.len as usize];
    files.read_exact_at(v.extent, &mut bytes)?;
    let item = v.format.planes()[0].bytes;
    let mut all = vec![0.0; bytes.len() / item];
    forebay_quant::decode_floats(v.format, &bytes, &mut all);
    Ok(all.into_iter().step_by(v.stride).take(v.len).collect())
}

/// A vector of a program as it is used.
pub fn load_vector(files: &FileSet, vector: &Vector) -> Result<Vec<f32>, StoreError> {
    let add = if vector.plus_one { 1.0 } else { 0.0 };
    let finish = |x: f32| (x + add) * vector.factor;
    let plain: Vec<f32> = read_vector(files, &vector.source)?.into_iter().map(finish).collect();
    Ok(match vector.form {
        VectorForm::Plain => plain,
        VectorForm::NegativeExp => plain.into_iter().map(|x| -vecmath::exp(x)).collect(),
        VectorForm::Transposed { inner } => {
            let column = |c: usize| plain.iter().skip(c).step_by(inner).copied();
            (0..inner).flat_map(column).collect()
        }
    })
}
