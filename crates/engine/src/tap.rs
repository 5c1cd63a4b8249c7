//! Taps on the choice of experts: traces and histograms.
//!
//! A tap sees every choice of every pass, whatever the residency, the batch and the chunk, and changes
//! nothing. Without one nothing is paid.

use std::io::{self, Write};

use forebay_program::Routing;

/// Sees choices.
pub trait RoutingTap: Send {
    /// The rows of a pass chose experts at the routed layer `moe` (an index into `Program::moes`).
    fn routed(&mut self, moe: usize, top_k: usize, routing: &Routing);
}

/// How often each expert was chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// `[routed layers][experts]`
    pub counts: Vec<Vec<u64>>,
}

impl Histogram {
    /// For routed layers with so many experts each.
    pub fn new(experts: impl IntoIterator<Item = usize>) -> Histogram {
        Histogram { counts: experts.into_iter().map(|n| vec![0; n]).collect() }
    }

    /// Counts a choice.
    pub fn add(&mut self, moe: usize, ids: &[u16]) {
        for &id in ids {
            self.counts[moe][id as usize] += 1;
        }
    }

    /// Entropy of a layer's choices in bits; `log2(experts)` when all are chosen alike.
    pub fn entropy(&self, moe: usize) -> f64 {
        let counts = &self.counts[moe];
        let total: u64 = counts.iter().sum();
        let share = |&n: &u64| n as f64 / total as f64;
        let used = counts.iter().filter(|&&n| n > 0);
        used.map(share).map(|p| -p * p.log2()).sum()
    }

    /// Share of all choices that a layer's `n` most chosen experts get.
    pub fn share_of_top(&self, moe: usize, n: usize) -> f64 {
        let mut counts = self.counts[moe].clone();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let top: u64 = counts.iter().take(n).sum();
        let total: u64 = counts.iter().sum();
        if total == 0 { 0.0 } else { top as f64 / total as f64 }
    }
}

/// Writes choices as lines of text: `layer rows id id id ...`, ids row by row in rank order.
pub struct TraceWriter<W> {
    out: W,
    /// Told when the trace is ended; writing stops at the first failure.
    failed: Option<io::Error>,
    ended: bool,
}

impl<W: Write> TraceWriter<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> TraceWriter<W> {
        TraceWriter { out, failed: None, ended: false }
    }

    /// Ends the trace: the first failure, or what flushing says.
    ///
    /// # Errors
    /// The trace is not whole.
    pub fn finish(&mut self) -> io::Result<()> {
        self.ended = true;
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }

    fn line(&mut self, moe: usize, rows: usize, ids: &[u16]) -> io::Result<()> {
        write!(self.out, "{moe} {rows}")?;
        ids.iter().try_for_each(|id| write!(self.out, " {id}"))?;
        writeln!(self.out)
    }
}

impl<W: Write + Send> RoutingTap for TraceWriter<W> {
    fn routed(&mut self, moe: usize, top_k: usize, routing: &Routing) {
        if self.failed.is_none() && !self.ended {
            let rows = routing.ids.len() / top_k.max(1);
            self.failed = self.line(moe, rows, &routing.ids).err();
        }
    }
}

impl RoutingTap for Histogram {
    fn routed(&mut self, moe: usize, _: usize, routing: &Routing) {
        self.add(moe, &routing.ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_of_even_and_of_single_choices() {
        let mut h = Histogram::new([4, 4]);
        h.add(0, &[0, 1, 2, 3]);
        h.add(1, &[2, 2]);
        assert_eq!((h.entropy(0), h.entropy(1)), (2.0, 0.0));
        assert_eq!((h.share_of_top(0, 1), h.share_of_top(1, 1)), (0.25, 1.0));
    }

    #[test]
    fn a_trace_is_text() {
        let mut out = Vec::new();
        let mut w = TraceWriter::new(&mut out);
        w.routed(3, 2, &Routing { ids: vec![7, 1, 0, 7], weights: vec![0.5; 4] });
        w.finish().unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "3 2 7 1 0 7\n");
    }
}
