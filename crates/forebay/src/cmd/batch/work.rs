//! The loop of a batch: so many lines open at once, each answered once, and asked once more where the engine failed at it.

use std::collections::{HashSet, VecDeque};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use forebay_serve::{ApiError, Kind, Service};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::input::{Line, Requests};
use super::output::{self, Output};
use crate::term::{Bar, note};

/// How often a line says how far it is where there is no terminal for a bar.
const SAYS: Duration = Duration::from_secs(60);

/// The body of a response, or what is wrong.
type Answered = Result<Value, ApiError>;

/// What became of lines.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Lines that were written.
    pub answered: usize,
    /// Of these, what was wrong with the request.
    pub refused: usize,
    /// Of these, what the engine failed at, twice.
    pub faults: usize,
    /// Lines that were asked once more.
    pub again: usize,
}

/// The lines to answer.
struct Turns {
    /// In their order; those that come again first.
    todo: VecDeque<usize>,
    again: HashSet<usize>,
}

impl Turns {
    /// Whether a line that the engine failed at is asked once more: the fault may be the moment's, as where a disk did not
    /// answer, or another line's of the same step.
    fn once_more(&mut self, index: usize) -> bool {
        let first = self.again.insert(index);
        if first {
            self.todo.push_front(index);
        }
        first
    }
}

/// A batch at work.
pub struct Work {
    service: Arc<Service>,
    requests: Requests,
    output: Output,
    turns: Turns,
    done: Done,
    bar: Bar,
    said: Instant,
}

impl Work {
    /// Answers the lines `todo` of `requests` into `output`.
    pub fn new(
        service: Arc<Service>,
        requests: Requests,
        output: Output,
        todo: VecDeque<usize>,
    ) -> Work {
        let turns = Turns { todo, again: HashSet::new() };
        let (bar, said) = (Bar::steps("answering"), Instant::now());
        Work { service, requests, output, turns, done: Done::default(), bar, said }
    }

    /// Runs until all are answered, or `cancel`, which ends the engine too. `parallel` are computed at once.
    ///
    /// # Errors
    /// The output takes no more, the input changed, or the engine has ended.
    pub fn run(mut self, parallel: usize, cancel: &AtomicBool) -> anyhow::Result<(Done, Output)> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(2)
            .enable_all()
            .build()
            .context("starting a thread")?;
        let (send, receive) = unbounded_channel();
        let result = runtime.block_on(self.answer_all(parallel, cancel, send, receive));
        self.bar.clear();
        result?;
        Ok((self.done, self.output))
    }

    async fn answer_all(
        &mut self,
        parallel: usize,
        cancel: &AtomicBool,
        send: UnboundedSender<(usize, Answered)>,
        mut receive: UnboundedReceiver<(usize, Answered)>,
    ) -> anyhow::Result<()> {
        let mut open = 0;
        loop {
            // As many as are computed at once, and as many that wait for a place.
            while open < 2 * parallel && !cancel.load(Ordering::Relaxed) {
                let Some(index) = self.turns.todo.pop_front() else { break };
                self.ask(index, send.clone())?;
                open += 1;
            }
            if open == 0 {
                return Ok(());
            }
            let received = tokio::time::timeout(Duration::from_millis(100), receive.recv()).await;
            if cancel.load(Ordering::Relaxed) {
                self.service.scheduler().abort();
                return Ok(());
            }
            if let Ok(Some((index, answer))) = received {
                open -= 1;
                self.take(index, answer)?;
            }
        }
    }

    /// Begins to answer a line.
    fn ask(
        &mut self,
        index: usize,
        send: UnboundedSender<(usize, Answered)>,
    ) -> anyhow::Result<()> {
        let service = self.service.clone();
        let (url, body) = (self.requests.lines()[index].url, self.requests.body(index)?);
        let answer = tokio::spawn(async move { service.answer(url, &body).await });
        tokio::spawn(async move {
            // A panic there is that line's alone.
            let answer = answer.await.unwrap_or_else(|fault| {
                let what = format!("answering this line failed: {fault}");
                Err(ApiError::new(Kind::Internal, what))
            });
            // The receiver lives until all are done.
            let _ = send.send((index, answer));
        });
        Ok(())
    }

    /// Takes what came of a line.
    fn take(&mut self, index: usize, answer: Answered) -> anyhow::Result<()> {
        let own = |fault: &ApiError| matches!(fault.kind, Kind::Internal | Kind::Closing);
        match &answer {
            Ok(_) => {}
            Err(fault) if own(fault) => {
                // What an engine that is gone says is no answer to the line: it comes again.
                if self.service.scheduler().with_engine(|_| ()).is_err() {
                    let what = &fault.message;
                    anyhow::bail!(
                        "the engine has ended: {what} (the same command goes on from here)"
                    );
                }
                let id = &self.requests.lines()[index].id;
                if self.turns.once_more(index) {
                    note!("note: {id:?} failed and is tried again: {}", fault.message);
                    self.done.again += 1;
                    return Ok(());
                }
                note!("note: {id:?} failed again, and has no answer: {}", fault.message);
                self.done.faults += 1;
            }
            Err(_) => self.done.refused += 1,
        }
        let lines = self.requests.lines();
        self.output.put(index, &line(index, &lines[index], answer))?;
        self.done.answered += 1;
        let (count, all) = (self.output.count(), lines.len());
        self.bar.set(count as u64, all as u64);
        if self.said.elapsed() > SAYS && !std::io::stderr().is_terminal() {
            self.said = Instant::now();
            note!("{count} of {all} lines are done");
        }
        Ok(())
    }
}

/// A line of the output.
fn line(index: usize, line: &Line, answer: Answered) -> Value {
    let (status, body) = match answer {
        Ok(body) => (200, body),
        Err(error) => (error.status(), error.openai_body()),
    };
    json!({
        "id": output::name(line),
        "custom_id": line.id,
        "response": { "status_code": status, "request_id": format!("req_{index}"), "body": body },
        "error": null,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_failed_comes_next_and_once() {
        let mut turns = Turns { todo: [4, 5].into(), again: HashSet::new() };
        assert!(turns.once_more(2));
        assert_eq!(turns.todo, [2, 4, 5]);
        turns.todo.pop_front();
        assert!(!turns.once_more(2));
        assert_eq!(turns.todo, [4, 5]);
        assert!(turns.once_more(4));
    }
}
