//! Where the time of operations goes: one row per kind of operation, for backends that can tell.
//!
//! Names come from the program ([`Program::op_name`]): layers of one shape share a row, formats do not, since each
//! has its own kernel. What memory and arithmetic could have done at best is not known here; a caller that has
//! measured both divides by it.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::op::{LinearOp, Op, Operand, Program};

/// What an operation has to do, however it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of weights, keys, values and states that are read from memory.
    pub bytes: u64,
    /// Multiply-adds of 8-bit integers.
    pub integer_macs: u64,
    /// Multiply-adds of f32.
    pub float_macs: u64,
}

/// One kind of operation.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileRow {
    /// Its name.
    pub op: String,
    /// How often it ran.
    pub calls: u64,
    /// How long, in all.
    pub time: Duration,
    /// What it had to do, in all.
    pub work: Work,
}

/// Rows in the order in which they first ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// One for each kind.
    pub rows: Vec<ProfileRow>,
}

impl Profile {
    /// Notes one call.
    pub fn add(&mut self, op: &str, time: Duration, work: Work) {
        self.merge(op, 1, time, work);
    }

    /// Adds another profile's rows to these.
    pub fn add_all(&mut self, other: &Profile) {
        for r in &other.rows {
            self.merge(&r.op, r.calls, r.time, r.work);
        }
    }

    fn merge(&mut self, op: &str, calls: u64, time: Duration, work: Work) {
        let at = self.rows.iter().position(|r| r.op == op).unwrap_or_else(|| {
            let row =
                ProfileRow { op: op.into(), calls: 0, time: Duration::ZERO, work: Work::default() };
            self.rows.push(row);
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.calls += calls;
        row.time += time;
        row.work.bytes += work.bytes;
        row.work.integer_macs += work.integer_macs;
        row.work.float_macs += work.float_macs;
    }

    /// What was added since `earlier`, a snapshot of this profile.
    pub fn since(&self, earlier: &Profile) -> Profile {
        let rows = self.rows.iter().enumerate().map(|(i, r)| {
            let Some(e) = earlier.rows.get(i) else { return r.clone() };
            ProfileRow {
                op: r.op.clone(),
                calls: r.calls - e.calls,
                time: r.time - e.time,
                work: Work {
                    bytes: r.work.bytes - e.work.bytes,
                    integer_macs: r.work.integer_macs - e.work.integer_macs,
                    float_macs: r.work.float_macs - e.work.float_macs,
                },
            }
        });
        Profile { rows: rows.filter(|r| r.calls > 0).collect() }
    }
}

impl Program {
    /// What an operation is called in a profile; products by the tensors of their weights and their formats, as
    /// in `linear attn_q attn_k attn_v (Q8_0)`.
    pub fn op_name(&self, op: &Op) -> String {
        match op {
            Op::RopeAngles { .. } => "rope angles".into(),
            Op::RmsNorm { .. } => "norm".into(),
            Op::HeadNorm { .. } => "norm of heads".into(),
            Op::Pack { .. } => "pack to 8 bits".into(),
            Op::Linears(list) => {
                let (mut names, mut formats) = (String::new(), BTreeSet::new());
                for l in list {
                    let w = &self.weights[l.weight.0];
                    names.push(' ');
                    names.push_str(short(&w.name));
                    formats.insert(w.format.name());
                }
                let formats: Vec<_> = formats.into_iter().collect();
                format!("linear{names} ({})", formats.join(" "))
            }
            Op::Rope { .. } => "rope".into(),
            Op::StoreKv { .. } => "store keys and values".into(),
            Op::Attention(a) => match a.window {
                Some(window) => format!("attention (window {window})"),
                None => "attention".into(),
            },
            Op::Copy { .. } => "copy".into(),
            Op::Scale { .. } => "scale".into(),
            Op::Add { .. } => "add".into(),
            Op::Glu { .. } => "glu".into(),
            Op::SplitHeads { .. } => "split heads".into(),
            Op::Join { .. } => "join".into(),
            Op::Gate { .. } => "gate".into(),
            Op::ConvSilu { .. } => "convolution".into(),
            Op::DeltaRule { .. } => "delta rule".into(),
            Op::Route { .. } => "route".into(),
            Op::Guess { .. } => "guess".into(),
            Op::Combine { .. } => "combine experts".into(),
            Op::Tap(tap) => format!("tap {}", tap.point),
        }
    }

    /// Multiply-adds of products with `rows` rows.
    pub fn linear_work(&self, list: &[LinearOp], rows: usize) -> Work {
        let mut work = Work::default();
        for l in list {
            let w = &self.weights[l.weight.0];
            let macs = rows as u64 * w.rows as u64 * w.cols as u64;
            match l.src {
                Operand::Packed(_) => work.integer_macs += macs,
                Operand::F32(_) => work.float_macs += macs,
            }
        }
        work
    }
}

/// The part of a tensor's name that tells it from others of its layer.
fn short(name: &str) -> &str {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    name.rsplit('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(bytes: u64) -> Work {
        Work { bytes, integer_macs: 2 * bytes, float_macs: 3 * bytes }
    }

    /// A snapshot and what came after it add up to the whole, whatever the order.
    #[test]
    fn difference_and_sum_are_inverse() {
        let mut all = Profile::default();
        all.add("a", Duration::from_millis(1), work(1));
        all.add("b", Duration::from_millis(2), work(10));
        let early = all.clone();
        all.add("c", Duration::from_millis(4), work(100));
        all.add("a", Duration::from_millis(8), work(1000));
        let late = all.since(&early);
        let names: Vec<&str> = late.rows.iter().map(|r| r.op.as_str()).collect();
        assert_eq!(names, ["a", "c"]);
        assert_eq!((late.rows[0].calls, late.rows[0].work), (1, work(1000)));
        let mut sum = early;
        sum.add_all(&late);
        assert_eq!(sum, all);
    }

    #[test]
    fn names_of_tensors_lose_their_layer() {
        for (name, expected) in [
            ("blk.11.attn_q.weight", "attn_q"),
            ("model.layers.0.self_attn.q_proj.weight", "q_proj"),
            ("output.weight", "output"),
            ("odd", "odd"),
        ] {
            assert_eq!(short(name), expected);
        }
    }
}
