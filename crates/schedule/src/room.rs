//! Room for answers that grow: pages of keys and values are promised before they are needed, never more than there are.
//!
//! An answer begins with room for its prompt and [`GROWTH`] tokens, or for fewer where it may ask for fewer, and is promised
//! more as it grows. Where nothing is left to promise, the youngest answer that has not yet all that it may ask for pauses:
//! it gives its pages back, and goes on when there is room for all. So an answer pauses at most once; one
//! that asks for few tokens never does; and there is always one that runs, since one alone finds all pages free. What a paused
//! answer had computed is computed again from its tokens, which gives the same bits.

/// Tokens that an answer has room for at first, and is given room for at a time.
pub(crate) const GROWTH: usize = 128;

/// Positions that are promised to an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// So many may be computed now.
    pub positions: usize,
    /// Pages of the classes that are enough for them.
    pub pages: Vec<usize>,
    /// So many it will never exceed.
    pub most: usize,
}

impl Room {
    /// Whether it can grow no more.
    pub fn is_whole(&self) -> bool {
        self.positions >= self.most
    }

    /// Positions to promise, so that `needed` can be computed; none: there is room for them.
    pub fn wanted(&self, needed: usize) -> Option<usize> {
        let needed = needed.min(self.most);
        (needed > self.positions).then(|| (self.positions + GROWTH).max(needed).min(self.most))
    }
}

/// Pages of the classes that nobody has been promised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Free(Vec<usize>);

impl Free {
    /// What is left of `all` beside what is promised.
    pub fn of<'a>(all: Vec<usize>, promised: impl Iterator<Item = &'a Room>) -> Free {
        let mut free = Free(all);
        promised.for_each(|room| free.take(&room.pages));
        free
    }

    /// Whether there are so many.
    pub fn has(&self, pages: &[usize]) -> bool {
        pages.iter().zip(&self.0).all(|(n, free)| n <= free)
    }

    /// Promises so many.
    pub fn take(&mut self, pages: &[usize]) {
        self.0.iter_mut().zip(pages).for_each(|(free, n)| *free = free.saturating_sub(*n));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_grows_to_the_most_and_no_further() {
        let mut room = Room { positions: 30, pages: Vec::new(), most: 300 };
        assert_eq!(room.wanted(30), None);
        assert_eq!(room.wanted(31), Some(30 + GROWTH));
        assert_eq!(room.wanted(200), Some(200));
        assert_eq!(room.wanted(1000), Some(300));
        room.positions = 290;
        assert_eq!(room.wanted(291), Some(300));
        assert!(!room.is_whole());
        room.positions = 300;
        assert_eq!(room.wanted(1000), None);
        assert!(room.is_whole());
    }

    #[test]
    fn what_is_promised_is_not_free() {
        let room = |pages: [usize; 2]| Room { positions: 0, pages: pages.into(), most: 0 };
        let free = Free::of(vec![5, 3], [room([1, 1]), room([2, 0])].iter());
        assert_eq!(free, Free(vec![2, 2]));
        assert!(free.has(&[2, 2]) && !free.has(&[3, 0]) && !free.has(&[0, 3]));
    }
}
