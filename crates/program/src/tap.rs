//! Named points of a program, at which rows may be looked at and changed.
//!
//! A point is a place in every layer, in words that hold for all families: the lowering knows where it is, no family does.
//! Taps are lowered only where somebody asks for them, so that a program without them is the same as if there were none.
//!
//! Not here: what is done at a tap (`forebay-engine`: steering and capture).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::op::BufferId;

/// A place in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Point {
    /// The residual stream when attention (or what mixes positions in its place) has been added, `[rows, d]`.
    Attention,
    /// The residual stream when the layer is done, `[rows, d]`: what the next layer begins with.
    FeedForward,
    /// The logits of the router, `[rows, E]`.
    Router,
    /// The chosen experts and their weights, `[rows, top_k]`. Programs have no operation for it: the choice is read back anyway.
    Choice,
}

impl Point {
    /// All points, in the order in which a layer passes them.
    pub const ALL: [Point; 4] =
        [Point::Attention, Point::Router, Point::Choice, Point::FeedForward];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Point::Attention => "attention",
            Point::FeedForward => "feed-forward",
            Point::Router => "router",
            Point::Choice => "choice",
        }
    }

    /// Whether the residual stream is there.
    pub fn is_stream(self) -> bool {
        matches!(self, Point::Attention | Point::FeedForward)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Point {
    type Err = String;

    fn from_str(s: &str) -> Result<Point, String> {
        let found = Point::ALL.into_iter().find(|point| point.name() == s);
        found.ok_or_else(|| {
            let names: Vec<&str> = Point::ALL.iter().map(|point| point.name()).collect();
            format!("{s:?} is no point; there are {}", names.join(", "))
        })
    }
}

/// A tap in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tap {
    /// Layer in the model.
    pub layer: usize,
    /// Where in the layer.
    pub point: Point,
    /// The rows there.
    pub buf: BufferId,
}

/// Places that somebody asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapSet {
    places: BTreeSet<(usize, Point)>,
}

impl TapSet {
    /// Asks for a place.
    pub fn insert(&mut self, layer: usize, point: Point) {
        self.places.insert((layer, point));
    }

    /// Whether somebody asks for it.
    pub fn contains(&self, layer: usize, point: Point) -> bool {
        self.places.contains(&(layer, point))
    }

    /// Whether nobody asks for anything.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// All places, by layer.
    pub fn iter(&self) -> impl Iterator<Item = (usize, Point)> + '_ {
        self.places.iter().copied()
    }
}

impl Extend<(usize, Point)> for TapSet {
    fn extend<T: IntoIterator<Item = (usize, Point)>>(&mut self, places: T) {
        self.places.extend(places);
    }
}
