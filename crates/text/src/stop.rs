//! Stop strings that may straddle pieces of streamed text.
//!
//! The outcome does not depend on how the text was cut: the stop that is complete first wins, as if the text
//! came character by character, and of several complete at once the one that began first.

/// Outcome of a push.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stopped {
    /// Text that is now certain to belong to the answer.
    pub text: String,
    /// The stop string that was reached (index as given); nothing may be pushed after it.
    pub stop: Option<usize>,
}

/// Finds stop strings in a stream, holding back only a tail that can still become one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    done: bool,
}

impl StopMatcher {
    /// A matcher for these strings. Empty ones never match.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        Self {
            stops: stops.into_iter().map(Into::into).collect(),
            held: String::new(),
            done: false,
        }
    }

    /// Takes the next piece. After a stop, further text is dropped.
    pub fn push(&mut self, piece: &str) -> Stopped {
        if self.done {
            return Stopped::default();
        }
        self.held.push_str(piece);
        // The least end; of equal ends the earliest start, which is the longest stop.
        let hit = self
            .stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty())
            .filter_map(|(index, stop)| {
                let start = self.held.find(stop.as_str())?;
                Some((start + stop.len(), start, index))
            })
            .min();
        if let Some((_, start, index)) = hit {
            self.done = true;
            self.held.truncate(start);
            return Stopped { text: std::mem::take(&mut self.held), stop: Some(index) };
        }
        let keep_from = self.held.len() - self.tail_bytes();
        let tail = self.held.split_off(keep_from);
        Stopped { text: std::mem::replace(&mut self.held, tail), stop: None }
    }

    /// What is held back belongs to the answer, and no stop string reaches across this place.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stream ended by itself: whatever was held back belongs to the answer.
    pub fn finish(&mut self) -> String {
        self.done = true;
        std::mem::take(&mut self.held)
    }

    /// Bytes of the longest suffix of the held text that is a proper prefix of a stop.
    fn tail_bytes(&self) -> usize {
        let held = self.held.as_bytes();
        self.stops
            .iter()
            .map(|stop| {
                let stop = stop.as_bytes();
                (1..stop.len().min(held.len() + 1))
                    .rev()
                    .find(|&n| held.ends_with(&stop[..n]))
                    .unwrap_or(0)
            })
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deltas(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().copied());
        let mut out = Vec::new();
        for piece in pieces {
            let got = matcher.push(piece);
            out.push(got.text);
            if got.stop.is_some() {
                return (out, got.stop);
            }
        }
        out.push(matcher.finish());
        (out, None)
    }

    #[test]
    fn rows() {
        /// Stops, pieces, what each push (and at last `finish`) gives, and the stop that was reached.
        type Row = (
            &'static [&'static str],
            &'static [&'static str],
            &'static [&'static str],
            Option<usize>,
        );
        let rows: [Row; 8] = [
            (&["grey heron"], &["A gr", "ey he", "ron stood"], &["A ", "", ""], Some(0)),
            (&["ababc"], &["ab", "ab", "ab", "c"], &["", "", "ab", ""], Some(0)),
            (&["heron!"], &["a her", "on."], &["a ", "heron.", ""], None),
            (&["abcd", "c"], &["abc", "d"], &["ab"], Some(1)),
            (&["yz", "xyz"], &["wxyz"], &["w"], Some(1)),
            (&[""], &["a"], &["a", ""], None),
            (&["é!"], &["é", "é", "!"], &["", "é", ""], Some(0)),
            (&["\n\n"], &["a\n", "b\n"], &["a", "\nb", "\n"], None),
        ];
        for (stops, pieces, want, stop) in rows {
            let (got, hit) = deltas(stops, pieces);
            assert_eq!(got, want, "{stops:?} {pieces:?}");
            assert_eq!(hit, stop, "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn nothing_after_a_stop() {
        let mut matcher = StopMatcher::new(["x"]);
        assert_eq!(matcher.push("axb").text, "a");
        assert_eq!(matcher.push("c"), Stopped::default());
        assert_eq!(matcher.finish(), "");
    }

    proptest::proptest! {
        #[test]
        fn cut_anywhere(text in "[abc]{0,20}", stops in proptest::collection::vec("[abc]{1,4}", 0..3), cuts in proptest::collection::vec(0usize..20, 0..6)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let singles: Vec<String> = text.chars().map(String::from).collect();
            let singles: Vec<&str> = singles.iter().map(String::as_str).collect();
            let mut bounds: Vec<usize> = cuts.into_iter().map(|c| c.min(text.len())).collect();
            bounds.extend([0, text.len()]);
            bounds.sort_unstable();
            let pieces: Vec<&str> = bounds.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let (a, stop_a) = deltas(&stops, &singles);
            let (b, stop_b) = deltas(&stops, &pieces);
            proptest::prop_assert_eq!((a.concat(), stop_a), (b.concat(), stop_b));
        }
    }
}
