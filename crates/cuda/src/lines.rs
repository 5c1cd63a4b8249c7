//! A row's logits by lines: what choosing a token needs of them, so that they stay on the GPU
//! ([`forebay_program::LogitLines`]). Not here: the head, the choice.

use forebay_program::{LOGIT_LINE, LogitLines};

use crate::args::{LinesArgs, Ptr};
use crate::driver::{Driver, Kernel, Launch, bytes_of};
use crate::error::CudaError;

/// Where results lie: own sums and sums of each line as f64, then the largest of each as f32, without gaps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinesAt {
    at: Ptr,
    lines: usize,
    own: bool,
}

impl LinesAt {
    /// Bytes for a row of `n` logits.
    pub(crate) fn bytes(n: usize) -> usize {
        20 * n.div_ceil(LOGIT_LINE)
    }

    /// Enqueues the kernels for `n` logits, with `t` as the factor of own sums; results go to `at`.
    pub(crate) fn enqueue(
        driver: &dyn Driver,
        logits: Ptr,
        n: usize,
        t: f32,
        at: Ptr,
    ) -> Result<LinesAt, CudaError> {
        let (lines, own) = (n.div_ceil(LOGIT_LINE), t != 1.0);
        let sums = at + 8 * lines as u64;
        let args = LinesArgs {
            logits,
            largest: sums + 8 * lines as u64,
            sums,
            own_sums: if own { at } else { 0 },
            n: n as u32,
            lines: lines as u32,
            t,
            pad: 0,
        };
        for kernel in [Kernel::LineMax, Kernel::LineSums] {
            let launch = Launch { kernel, grid: [lines as u32, 1, 1], threads: 256, shared: 0 };
            driver.launch(launch, bytes_of(&[args]))?;
        }
        Ok(LinesAt { at, lines, own })
    }

    /// What is to be read: address and bytes.
    pub(crate) fn results(&self) -> (Ptr, usize) {
        match self.own {
            true => (self.at, 20 * self.lines),
            false => (self.at + 8 * self.lines as u64, 12 * self.lines),
        }
    }

    /// Takes apart what was read.
    pub(crate) fn parse(&self, bytes: &[u8], to: &mut LogitLines) {
        let (sums, largest) = bytes.split_at(bytes.len() - 4 * self.lines);
        let mut sums = sums.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b));
        to.own_sums.clear();
        to.own_sums.extend(sums.by_ref().take(if self.own { self.lines } else { 0 }));
        to.sums.clear();
        to.sums.extend(sums);
        to.largest.clear();
        to.largest.extend(largest.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)));
    }
}
