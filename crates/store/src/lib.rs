//! Where weight bytes live: positioned reads, memory regions, the trunk image and the expert store.
//!
//! What is here: everything that touches the disk for weights, behind one platform trait, and the
//! bounded cache of experts with its leases ([`ExpertStore`]). What is not here: what the bytes mean to
//! a kernel beyond a checked [`forebay_quant::MatrixView`].

use forebay_quant::MatrixView;

/// One expert's matrices in memory. Kernels see this and never a slot index.
#[derive(Clone, Copy, Debug)]
pub struct ExpertView<'a> {
    /// `[inter, d]`
    pub gate: MatrixView<'a>,
    /// `[inter, d]`
    pub up: MatrixView<'a>,
    /// `[d, inter]`
    pub down: MatrixView<'a>,
}
