//! Reads that were not begun: which of them is next, when it may begin, and from which disk.
//!
//! Demanded reads go first; what nobody demanded begins only while nothing demanded is waiting or being
//! read. Each copy of the checkpoint is a lane with its own depth ([`crate::depth`]) and its own
//! speed, both measured; a read goes to the lane where it will be over first, but not to a slow one that
//! would then be what all others wait for.

use std::collections::VecDeque;
use std::time::Instant;

use crate::depth::{Depth, QueueDepth};
use crate::queue::{ReadRequest, Urgency};
use crate::region::Piece;

#[derive(Debug)]
pub(crate) struct Backlog {
    demanded: VecDeque<ReadRequest>,
    ahead: VecDeque<ReadRequest>,
    demanded_begun: usize,
    /// One per copy.
    lanes: Vec<Lane>,
}

/// A request that is to be made now, and what [`Backlog::finish`] wants back.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) request: ReadRequest,
    pub(crate) ticket: Ticket,
}

/// A request that was begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    /// Copy to read from.
    pub(crate) lane: usize,
    urgency: Urgency,
    bytes: u64,
}

#[derive(Debug)]
struct Lane {
    depth: Depth,
    begun: usize,
    /// Of the requests begun.
    bytes: u64,
    /// Since when, or since which completion, something is being read.
    busy_since: Option<Instant>,
    /// What was read lately, and how long it took.
    recent_bytes: f64,
    recent_seconds: f64,
}

/// What a completion leaves of the weight of earlier ones.
const FADE: f64 = 0.95;
/// Bytes per second of a disk that was not read from yet: it shall be tried.
const UNKNOWN: f64 = 1e12;

impl Backlog {
    pub(crate) fn new(lanes: usize, depth: QueueDepth) -> Backlog {
        let lane = || Lane {
            depth: Depth::new(depth),
            begun: 0,
            bytes: 0,
            busy_since: None,
            recent_bytes: 0.0,
            recent_seconds: 0.0,
        };
        Backlog {
            demanded: VecDeque::new(),
            ahead: VecDeque::new(),
            demanded_begun: 0,
            lanes: (0..lanes).map(|_| lane()).collect(),
        }
    }

    pub(crate) fn push(&mut self, request: ReadRequest) {
        match request.urgency {
            Urgency::Demanded => self.demanded.push_back(request),
            Urgency::Ahead => self.ahead.push_back(request),
        }
    }

    /// The request to begin now, if any, from one of the lanes that are usable.
    pub(crate) fn begin(&mut self, usable: impl Fn(usize) -> bool, now: Instant) -> Option<Begun> {
        let queue = match (self.demanded.is_empty(), self.demanded_begun) {
            (false, _) => &mut self.demanded,
            (true, 0) => &mut self.ahead,
            (true, _) => return None,
        };
        let bytes = queue.front()?.dest.len() as u64;
        let lane = match self.lanes.len() {
            1 => (self.lanes[0].begun < self.lanes[0].depth.limit()).then_some(0)?,
            _ => {
                let waiting = queue.iter().map(|request| request.dest.len() as u64).sum();
                choose(&self.lanes, bytes, waiting, usable)?
            }
        };
        let request = queue.pop_front().expect("just seen");
        let waiting = !queue.is_empty();
        let urgency = request.urgency;
        self.demanded_begun += usize::from(urgency == Urgency::Demanded);
        self.lanes[lane].begin(bytes, now, waiting);
        Some(Begun { request, ticket: Ticket { lane, urgency, bytes } })
    }

    /// A request that was begun is over.
    pub(crate) fn finish(&mut self, ticket: Ticket, now: Instant) {
        self.demanded_begun -= usize::from(ticket.urgency == Urgency::Demanded);
        let waiting = match ticket.urgency {
            Urgency::Demanded => !self.demanded.is_empty(),
            Urgency::Ahead => !self.ahead.is_empty(),
        };
        self.lanes[ticket.lane].finish(ticket.bytes, now, waiting);
    }

    /// Nothing waits to be begun.
    pub(crate) fn is_empty(&self) -> bool {
        self.demanded.is_empty() && self.ahead.is_empty()
    }

    /// Reads that may be in flight at once, as far as is known now.
    pub(crate) fn depth(&self) -> usize {
        self.lanes.iter().map(|lane| lane.depth.limit()).sum()
    }

    /// The same of the first disk alone.
    pub(crate) fn first_depth(&self) -> usize {
        self.lanes[0].depth.limit()
    }

    /// As [`crate::queue::ReadQueue::promote`]. Returns how many became demanded.
    pub(crate) fn promote(&mut self, tag: u64) -> usize {
        let requests = take_tag(&mut self.ahead, tag);
        let count = requests.len();
        let demanded = |request| ReadRequest { urgency: Urgency::Demanded, ..request };
        self.demanded.extend(requests.into_iter().map(demanded));
        count
    }

    /// As [`crate::queue::ReadQueue::withdraw`].
    pub(crate) fn withdraw(&mut self, tag: u64) -> Vec<Piece> {
        take_tag(&mut self.ahead, tag).into_iter().map(|request| request.dest).collect()
    }

    pub(crate) fn clear(&mut self) {
        self.demanded.clear();
        self.ahead.clear();
    }
}

/// The lane for a read of so many bytes, of so many that wait: where it will be over first of those
/// that are not full, unless it would then be over later than all that wait could be without it.
fn choose(
    lanes: &[Lane],
    bytes: u64,
    waiting: u64,
    usable: impl Fn(usize) -> bool,
) -> Option<usize> {
    let all_broken = !(0..lanes.len()).any(&usable);
    let lanes = || lanes.iter().enumerate().filter(|&(i, _)| all_broken || usable(i));
    let over_after = |lane: &Lane| (lane.bytes + bytes) as f64 / lane.speed().unwrap_or(UNKNOWN);
    let free = lanes().filter(|(_, lane)| lane.begun < lane.depth.limit());
    let (chosen, lane) = free.min_by(|a, b| over_after(a.1).total_cmp(&over_after(b.1)))?;
    let others = lanes().filter(|&(i, _)| i != chosen);
    let (speed, in_flight) = others
        .fold((0.0, 0), |sum, (_, lane)| (sum.0 + lane.speed().unwrap_or(0.0), sum.1 + lane.bytes));
    let without = (in_flight + waiting) as f64 / speed;
    (over_after(lane) <= without).then_some(chosen)
}

impl Lane {
    fn begin(&mut self, bytes: u64, now: Instant, waiting: bool) {
        self.begun += 1;
        self.bytes += bytes;
        self.busy_since.get_or_insert(now);
        if self.begun == self.depth.limit() && waiting {
            self.depth.full(now);
        }
    }

    fn finish(&mut self, bytes: u64, now: Instant, waiting: bool) {
        self.begun -= 1;
        self.bytes -= bytes;
        if let Some(since) = self.busy_since {
            let seconds = now.saturating_duration_since(since).as_secs_f64();
            self.recent_bytes = FADE * self.recent_bytes + bytes as f64;
            self.recent_seconds = FADE * self.recent_seconds + seconds;
        }
        self.busy_since = (self.begun > 0).then_some(now);
        self.depth.finished(bytes, now, waiting);
    }

    /// Bytes per second, if any were read yet.
    fn speed(&self) -> Option<f64> {
        (self.recent_seconds > 0.0).then(|| self.recent_bytes / self.recent_seconds)
    }
}

fn take_tag(requests: &mut VecDeque<ReadRequest>, tag: u64) -> VecDeque<ReadRequest> {
    let (taken, left) = requests.drain(..).partition(|request| request.tag == tag);
    *requests = left;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{ALIGN, HugePages, Region};
    use std::time::Duration;

    fn requests(count: usize, urgency: Urgency) -> Vec<ReadRequest> {
        let region = Region::new(count * ALIGN, HugePages::Default).unwrap();
        let (_, pieces) = region.lend((0..count).map(|i| i * ALIGN..(i + 1) * ALIGN));
        let request = |(i, dest)| ReadRequest {
            tag: i as u64 / 2,
            file: 0,
            offset: 0,
            need: ALIGN,
            dest,
            urgency,
        };
        pieces.into_iter().enumerate().map(request).collect()
    }

    #[test]
    fn demanded_first_and_nothing_beside_it() {
        let now = Instant::now();
        let mut backlog = Backlog::new(1, QueueDepth::Fixed(3));
        requests(4, Urgency::Ahead).into_iter().for_each(|r| backlog.push(r));
        let ahead = backlog.begin(|_| true, now).unwrap();
        requests(2, Urgency::Demanded).into_iter().for_each(|r| backlog.push(r));
        let first = backlog.begin(|_| true, now).unwrap();
        let second = backlog.begin(|_| true, now).unwrap();
        assert_eq!(first.request.urgency, Urgency::Demanded);
        assert!(backlog.begin(|_| true, now).is_none(), "three at once");
        backlog.finish(ahead.ticket, now);
        backlog.finish(first.ticket, now);
        assert!(backlog.begin(|_| true, now).is_none(), "a demanded read is in flight");
        backlog.finish(second.ticket, now);
        // The first read of tag 0 is gone; one of it and two of tag 1 are left.
        assert_eq!((backlog.promote(1), backlog.withdraw(0).len(), backlog.promote(0)), (2, 1, 0));
        let promoted = backlog.begin(|_| true, now).unwrap();
        assert_eq!((promoted.request.tag, promoted.request.urgency), (1, Urgency::Demanded));
    }

    /// Reads on two simulated disks; returns how many each made, and seconds.
    fn simulate(speeds: [f64; 2], broken: Option<usize>) -> ([usize; 2], f64) {
        let start = Instant::now();
        let mut now = start;
        let mut backlog = Backlog::new(2, QueueDepth::Fixed(2));
        requests(400, Urgency::Demanded).into_iter().for_each(|r| backlog.push(r));
        let mut disks: [VecDeque<Ticket>; 2] = Default::default();
        let mut free_at = [now; 2];
        let mut made = [0; 2];
        loop {
            while let Some(begun) = backlog.begin(|lane| Some(lane) != broken, now) {
                let lane = begun.ticket.lane;
                if disks[lane].is_empty() {
                    free_at[lane] = now + Duration::from_secs_f64(1.0 / speeds[lane]);
                }
                disks[lane].push_back(begun.ticket);
            }
            let busy = (0..2).filter(|&lane| !disks[lane].is_empty());
            let Some(lane) = busy.min_by_key(|&lane| free_at[lane]) else { break };
            now = free_at[lane];
            backlog.finish(disks[lane].pop_front().unwrap(), now);
            free_at[lane] = now + Duration::from_secs_f64(1.0 / speeds[lane]);
            made[lane] += 1;
        }
        (made, (now - start).as_secs_f64())
    }

    #[test]
    fn disks_share_by_speed() {
        let (made, seconds) = simulate([100.0, 100.0], None);
        assert!(made[0].abs_diff(made[1]) <= 4 && seconds < 2.1, "{made:?} {seconds}");
        let (made, seconds) = simulate([100.0, 300.0], None);
        assert!((280..=320).contains(&made[1]) && seconds < 1.1, "{made:?} {seconds}");
        // A slow one is tried, and then used only for what it can do in time.
        let (made, seconds) = simulate([100.0, 1.0], None);
        assert!(made[1] <= 8 && seconds < 8.0, "{made:?} {seconds}");
        let (made, _) = simulate([100.0, 300.0], Some(1));
        assert_eq!(made, [400, 0]);
    }
}
