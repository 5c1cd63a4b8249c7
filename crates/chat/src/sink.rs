//! Where parsed text goes: two lanes that trim their ends, and stop strings on the content.

use forebay_text::StopMatcher;

use crate::calls::Call;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A whole call.
    Call(Call),
}

/// Lanes of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Reasoning,
    Content,
}

/// Blanks that belong to the format where they stand at an end.
pub(crate) const BLANKS: [char; 4] = [' ', '\t', '\n', '\r'];

/// One lane: whether anything went out, and blanks that go out only when something follows.
#[derive(Debug, Default)]
struct Held {
    begun: bool,
    blanks: String,
}

impl Held {
    /// What of `text` goes out now.
    fn push(&mut self, text: &str) -> String {
        let text = if self.begun { text } else { text.trim_start_matches(BLANKS) };
        let solid = text.trim_end_matches(BLANKS);
        if solid.is_empty() {
            if self.begun {
                self.blanks.push_str(text);
            }
            return String::new();
        }
        self.begun = true;
        let mut out = std::mem::take(&mut self.blanks);
        out.push_str(solid);
        self.blanks.push_str(&text[solid.len()..]);
        out
    }
}

/// Collects deltas.
#[derive(Debug)]
pub(crate) struct Sink {
    out: Vec<Delta>,
    lanes: [Held; 2],
    stops: StopMatcher,
    /// Takes blanks at the ends away.
    trims: bool,
    stopped: Option<usize>,
    calls: usize,
}

impl Sink {
    pub(crate) fn new(stops: &[String], trims: bool) -> Sink {
        Sink {
            out: Vec::new(),
            lanes: Default::default(),
            stops: StopMatcher::new(stops.iter().cloned()),
            trims,
            stopped: None,
            calls: 0,
        }
    }

    /// Adds text to a lane.
    pub(crate) fn text(&mut self, lane: Lane, text: &str) {
        if text.is_empty() || self.stopped.is_some() {
            return;
        }
        if lane == Lane::Reasoning {
            return self.emit(lane, text);
        }
        let found = self.stops.push(text);
        self.emit(lane, &found.text);
        self.stopped = found.stop;
    }

    /// The next text of this lane is of another message: what came before ends with one newline.
    pub(crate) fn separate(&mut self, lane: Lane) {
        let held = &mut self.lanes[lane as usize];
        if held.begun {
            held.blanks = "\n".to_owned();
        }
    }

    /// Adds a call.
    pub(crate) fn call(&mut self, call: Call) {
        if self.stopped.is_none() {
            // What could still become a stop string ends here.
            let rest = self.stops.flush();
            self.emit(Lane::Content, &rest);
            self.calls += 1;
            self.out.push(Delta::Call(call));
        }
    }

    /// The end: text that was held back for a stop string goes out.
    pub(crate) fn finish(&mut self) {
        if self.stopped.is_none() {
            let rest = self.stops.finish();
            self.emit(Lane::Content, &rest);
        }
    }

    /// The stop string that was reached.
    pub(crate) fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Deltas since the last time.
    pub(crate) fn take(&mut self) -> Vec<Delta> {
        std::mem::take(&mut self.out)
    }

    fn emit(&mut self, lane: Lane, text: &str) {
        let text = match self.trims {
            true => self.lanes[lane as usize].push(text),
            false => text.to_owned(),
        };
        if text.is_empty() {
            return;
        }
        match (lane, self.out.last_mut()) {
            (Lane::Reasoning, Some(Delta::Reasoning(last))) => last.push_str(&text),
            (Lane::Content, Some(Delta::Content(last))) => last.push_str(&text),
            (Lane::Reasoning, _) => self.out.push(Delta::Reasoning(text)),
            (Lane::Content, _) => self.out.push(Delta::Content(text)),
        }
    }
}
