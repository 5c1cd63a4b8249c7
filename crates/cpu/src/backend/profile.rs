//! Times each operation where that was asked for; otherwise one comparison per operation is all it costs.
//!
//! Not here: names and sums ([`forebay_program::profile`]), limits of the machine ([`crate::peak`]).

use std::time::Instant;

use forebay_program::{AttentionOp, Op, Pass, Profile, Work};

use super::CpuBackend;

/// The profile, while one is wanted.
#[derive(Default)]
pub(super) struct Profiler(Option<Box<Profile>>);

/// When an operation began, and what had been read by then.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    start: Instant,
    bytes: u64,
}

impl Profiler {
    pub(super) fn set(&mut self, on: bool) {
        self.0 = on.then(Default::default);
    }

    pub(super) fn profile(&self) -> Profile {
        self.0.as_deref().cloned().unwrap_or_default()
    }

    /// An operation begins; `bytes` have been read so far.
    #[inline]
    pub(super) fn begin(&self, bytes: u64) -> Option<Mark> {
        self.0.as_ref().map(|_| Mark { start: Instant::now(), bytes })
    }

    /// It ended: `describe` gives its name and what it had to compute.
    #[inline]
    pub(super) fn end(
        &mut self,
        mark: Option<Mark>,
        bytes: u64,
        describe: impl FnOnce() -> (String, Work),
    ) {
        if let (Some(mark), Some(profile)) = (mark, &mut self.0) {
            let time = mark.start.elapsed();
            let (name, work) = describe();
            profile.add(&name, time, Work { bytes: bytes - mark.bytes, ..work });
        }
    }
}

impl CpuBackend {
    /// Name of an operation of the program, and what it has to compute for a pass.
    pub(super) fn describe(&self, pass: &Pass<'_>, op: &Op) -> (String, Work) {
        let program = &self.program;
        let work = match op {
            Op::Linears(list) => program.linear_work(list, pass.rows()),
            Op::Attention(a) => Work {
                float_macs: attention_macs(pass, a, program.kv_layers[a.kv.0].head_dim),
                ..Work::default()
            },
            Op::DeltaRule { layer, .. } => {
                let r = &program.recurrent[layer.0];
                let state = (r.n_v_heads * r.k_dim * r.v_dim) as u64;
                // Per element of the state: decay, recall by the key, write, read by the query.
                Work { float_macs: 4 * state * pass.rows() as u64, ..Work::default() }
            }
            _ => Work::default(),
        };
        (program.op_name(op), work)
    }
}

/// Scores and weighted values over the positions that each row sees.
fn attention_macs(pass: &Pass<'_>, op: &AttentionOp, head_dim: usize) -> u64 {
    let window = op.window.unwrap_or(usize::MAX) as u64;
    let seen: u64 = pass.positions.iter().map(|&p| (u64::from(p) + 1).min(window)).sum();
    seen * 2 * (op.n_heads * head_dim) as u64
}
