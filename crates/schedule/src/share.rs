//! How the rows of a step are divided among answers.
//!
//! Running answers come first, one row each, so that they keep flowing; prompts share what is left in equal
//! parts. While answers run that somebody reads along, prompts get a part of a step only: a step with a whole chunk
//! of prompt takes many times as long as one without.

use crate::scheduler::Pace;

/// What an answer could use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// One row: its next token.
    Token,
    /// So many rows of its prompt, at least one.
    Prompt(usize),
}

/// Rows for each of `needs`: at most `chunk` in all, at least one in all. `turn` counts steps: where there are
/// more answers than rows, they take turns.
pub(crate) fn share(needs: &[Need], chunk: usize, turn: usize, pace: Pace) -> Vec<usize> {
    let mut rows = vec![0; needs.len()];
    let mut left = chunk;
    let is_token = |need: &&Need| matches!(need, Need::Token);
    let running = needs.iter().filter(is_token).count();
    let prompts = needs.len() - running;
    // A single row goes to answers and to prompts in turn, and each kind counts its own turns: otherwise every
    // second one of a kind would never have its.
    let alternate = chunk == 1 && running > 0 && prompts > 0;
    let (prompts_turn, turn) =
        (alternate && turn % 2 == 1, if alternate { turn / 2 } else { turn });
    if running > 0 {
        // A row is kept for prompts, so that they get on however many answers run.
        let most = if prompts_turn || (prompts > 0 && chunk > 1) { chunk - 1 } else { chunk };
        let most = most.min(running);
        let all: Vec<usize> = (0..needs.len()).filter(|&i| needs[i] == Need::Token).collect();
        for k in 0..most {
            rows[all[(turn.wrapping_mul(most.max(1)) + k) % running]] = 1;
        }
        left -= most;
        if pace == Pace::Flowing {
            left = left.min((chunk / 4).max(64));
        }
    }
    // Smallest first: what a short prompt leaves goes to the longer ones.
    let mut order: Vec<(usize, usize)> = needs
        .iter()
        .enumerate()
        .filter_map(|(i, need)| match need {
            Need::Prompt(n) => Some((*n, i)),
            Need::Token => None,
        })
        .collect();
    order.sort_by_key(|(n, _)| *n);
    if left < prompts {
        // Not a row for each: take turns.
        let start = turn % prompts.max(1);
        order.sort_by_key(|(_, i)| *i);
        order.rotate_left(start);
        order.truncate(left);
    }
    let mut waiting = order.len();
    for (n, i) in order {
        rows[i] = n.min(left / waiting);
        left -= rows[i];
        waiting -= 1;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn needs() -> impl Strategy<Value = Vec<Need>> {
        let need = prop_oneof![Just(Need::Token), (1usize..600).prop_map(Need::Prompt)];
        proptest::collection::vec(need, 1..40)
    }

    proptest! {
        #[test]
        fn nobody_gets_more_than_there_is(
            needs in needs(), chunk in 1usize..600, turn in 0usize..100, full: bool,
        ) {
            let pace = if full { Pace::Full } else { Pace::Flowing };
            let rows = share(&needs, chunk, turn, pace);
            let sum: usize = rows.iter().sum();
            prop_assert!((1..=chunk).contains(&sum), "{rows:?}");
            for (need, rows) in needs.iter().zip(&rows) {
                match need {
                    Need::Token => prop_assert!(*rows <= 1),
                    Need::Prompt(n) => prop_assert!(rows <= n),
                }
            }
            // Nothing is left over that somebody could use.
            let wanted: usize = needs.iter().map(|n| if let Need::Prompt(n) = n { *n } else { 1 }).sum();
            prop_assert!(!full || sum == chunk.min(wanted), "{rows:?}");
            let running = needs.iter().filter(|n| **n == Need::Token).count();
            let prompts = needs.len() - running;
            // With room for all, all running answers get their row.
            if running + prompts.min(1) <= chunk {
                for (need, rows) in needs.iter().zip(&rows) {
                    prop_assert!(*need != Need::Token || *rows == 1);
                }
            }
        }

        #[test]
        fn everybody_gets_on(needs in needs(), chunk in 1usize..600) {
            let mut got = vec![0; needs.len()];
            for turn in 0..200 {
                for (sum, rows) in got.iter_mut().zip(share(&needs, chunk, turn, Pace::Flowing)) {
                    *sum += rows;
                }
            }
            prop_assert!(got.iter().all(|rows| *rows > 0), "{got:?}");
        }
    }

    #[test]
    fn a_single_row_reaches_everybody() {
        for needs in [
            vec![Need::Token, Need::Token, Need::Prompt(1)],
            vec![Need::Token, Need::Prompt(5), Need::Prompt(5)],
            vec![Need::Token, Need::Token, Need::Prompt(5), Need::Prompt(5)],
        ] {
            let rows = (0..8).map(|turn| share(&needs, 1, turn, Pace::Flowing));
            let got = rows.fold(vec![0; needs.len()], |sum, rows| {
                sum.iter().zip(&rows).map(|(a, b)| a + b).collect()
            });
            assert!(got.iter().all(|rows| *rows >= 2), "{needs:?}: {got:?}");
        }
    }

    #[test]
    fn prompts_share_equally_and_use_all() {
        let needs = [Need::Prompt(10), Need::Prompt(500), Need::Prompt(500)];
        assert_eq!(share(&needs, 512, 0, Pace::Flowing), [10, 251, 251]);
        let needs = [Need::Token, Need::Prompt(500), Need::Token];
        assert_eq!(share(&needs, 512, 0, Pace::Flowing), [1, 128, 1]);
        assert_eq!(share(&needs, 512, 0, Pace::Full), [1, 500, 1]);
    }
}
