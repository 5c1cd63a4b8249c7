//! Drafting by what was said before: where the last tokens were there once already, what followed them then.
//!
//! Also known as prompt lookup. It costs a walk over the tokens, no memory and no weights, and does well where
//! answers repeat their prompt: code that is changed, texts that are summed up.

use super::{DraftRequest, Drafter};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::Control;

/// So many tokens have to be the same.
const SHORTEST: usize = 2;
/// More of the same is no better.
const LONGEST: usize = 8;

/// Looks tokens up in the sequence itself.
#[derive(Debug, Default)]
pub struct Ngram;

impl Drafter for Ngram {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn draft(
        &mut self,
        _: &mut Engine,
        request: &mut DraftRequest<'_>,
        _: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        let tokens = request.tokens;
        if let Some(next) = earlier(tokens) {
            // What repeats itself is taken to go on so: drafts follow tokens.
            for i in next..next + request.most {
                let after = || request.drafts[i - tokens.len()];
                let token = tokens.get(i).copied().unwrap_or_else(after);
                request.push(token);
            }
        }
        Ok(())
    }
}

/// Index of what followed the longest earlier occurrence of the last tokens, the latest of the longest.
fn earlier(tokens: &[u32]) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let mut best = (SHORTEST - 1, None);
    for end in (0..before.len()).rev().filter(|&i| before[i] == last) {
        let pairs = before[..end].iter().rev().zip(before.iter().rev());
        let length = 1 + pairs.take(LONGEST - 1).take_while(|(a, b)| a == b).count();
        if length > best.0 {
            best = (length, Some(end + 1));
            if length == LONGEST {
                break;
            }
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_longest_and_then_the_latest() {
        assert_eq!(earlier(&[]), None);
        assert_eq!(earlier(&[1, 2, 3]), None);
        // One token alone says little.
        assert_eq!(earlier(&[1, 2, 1]), None);
        assert_eq!(earlier(&[1, 2, 3, 1, 2]), Some(2));
        // The latest of equals.
        assert_eq!(earlier(&[1, 2, 3, 1, 2, 4, 1, 2]), Some(5));
        // A longer one wins over a later one.
        assert_eq!(earlier(&[9, 1, 2, 3, 1, 2, 4, 9, 1, 2]), Some(3));
        assert_eq!(earlier(&[5; 4]), Some(3));
    }

    proptest! {
        /// Against trying all places and lengths.
        #[test]
        fn as_a_naive_search(tokens in proptest::collection::vec(0u32..4, 0..60)) {
            let n = tokens.len();
            let length = |end: usize| {
                let same = |k: &usize| *k <= end && tokens[end - k..end] == tokens[n - k..];
                (1..=LONGEST.min(n)).take_while(same).last().unwrap_or(0)
            };
            let places = (1..n).map(|end| (length(end), end)).filter(|(l, _)| *l >= SHORTEST);
            prop_assert_eq!(earlier(&tokens), places.max().map(|(_, end)| end));
        }
    }
}
