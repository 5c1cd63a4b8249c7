//! Cache policies by name: how experts are ordered, and how slots are shared between layers.

use std::fmt;
use std::str::FromStr;

use crate::error::StoreError;

/// Who has to go when a slot is needed. The design note on cache policies compares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// Least recently used, every layer with the same number of slots.
    Lru,
    /// Least frequently used with decay, every layer with the same number of slots.
    Lfu,
    /// As [`Policy::Lfu`], and slots move to the layers where they are measured to give more hits.
    #[default]
    Adaptive,
    /// Least recently used over all layers at once. For comparison: it gives no hits at all when
    /// slots are a little fewer than the experts of one token.
    LruShared,
    /// Least frequently used with decay over all layers at once.
    LfuShared,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 5] =
        [Policy::Lru, Policy::Lfu, Policy::Adaptive, Policy::LruShared, Policy::LfuShared];

    /// The name to choose it by.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Adaptive => "adaptive",
            Policy::LruShared => "lru-shared",
            Policy::LfuShared => "lfu-shared",
        }
    }

    pub(crate) fn order(self) -> Order {
        match self {
            Policy::Lru | Policy::LruShared => Order::Recency,
            Policy::Lfu | Policy::Adaptive | Policy::LfuShared => {
                Order::Frequency { half_life_tokens: HALF_LIFE_TOKENS }
            }
        }
    }

    pub(crate) fn sharing(self) -> Sharing {
        match self {
            Policy::Lru | Policy::Lfu => Sharing::Even,
            Policy::Adaptive => Sharing::Measured,
            Policy::LruShared | Policy::LfuShared => Sharing::None,
        }
    }
}

/// After so many tokens a use counts half: long enough to tell what a layer prefers from what it
/// happened to use last, short enough to follow a text.
const HALF_LIFE_TOKENS: f64 = 3.0;

/// What makes one expert hotter than another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    Recency,
    Frequency { half_life_tokens: f64 },
}

/// How slots are divided between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    None,
    Even,
    Measured,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = StoreError;
    fn from_str(name: &str) -> Result<Policy, StoreError> {
        Policy::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| StoreError::UnknownPolicy { name: name.into() })
    }
}
