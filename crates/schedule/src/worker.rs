//! The steps: admit, form a batch, compute it, choose tokens.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_engine::speculate::{Chosen, MOST_TOKENS, Turn};
use forebay_engine::{Batch, Control, Engine, EngineError, Logits, Sampler, Sequence};

use crate::job::{Outcome, Usage};
use crate::room::{Free, GROWTH, Room};
use crate::running::{Choice, Choosing, Running, keep};
use crate::scheduler::{CLOSING, Call, Pace, SchedulerOptions, Shared, Waiting};
use crate::share::{Need, share};

/// Counters are published at most this often while steps follow one another.
const PUBLISH: Duration = Duration::from_millis(50);

/// What became of an answer whose pass failed. Nobody but the server's end cancels a pass that somebody waits for.
fn failed(error: EngineError) -> Outcome {
    Outcome::Failed(match error {
        EngineError::Cancelled => CLOSING.into(),
        error => error.to_string(),
    })
}

pub(crate) struct Worker {
    engine: Engine,
    shared: Arc<Shared>,
    sequences: usize,
    pace: Pace,
    running: Vec<Running>,
    /// Those that wait for room, oldest first. They hold no pages.
    paused: VecDeque<Running>,
    next_id: u64,
    turn: usize,
    published: Instant,
}

impl Worker {
    pub(crate) fn new(engine: Engine, shared: Arc<Shared>, options: SchedulerOptions) -> Worker {
        Worker {
            engine,
            shared,
            sequences: options.sequences.max(1),
            pace: options.pace,
            running: Vec::new(),
            paused: VecDeque::new(),
            next_id: 0,
            turn: 0,
            published: Instant::now(),
        }
    }

    /// Runs until the scheduler is closed and all is done, or it is aborted.
    pub(crate) fn run(mut self) {
        self.steps();
        let last = std::mem::take(&mut self.shared.queue().last);
        last.into_iter().for_each(|call| call(&mut self.engine));
    }

    fn steps(&mut self) {
        self.publish();
        while self.next_work() {
            if self.shared.abort.load(Ordering::Relaxed) {
                self.begun().for_each(|r| r.outcome = Some(Outcome::Failed(CLOSING.into())));
                self.finish();
                return;
            }
            for r in self.begun().filter(|r| r.job.listener.is_gone()) {
                r.outcome = Some(Outcome::Gone);
            }
            self.finish();
            self.make_room();
            if !self.running.is_empty() {
                match &self.running[..] {
                    [one] if !one.in_prompt() && self.engine.speculation().is_some() => {
                        self.round();
                    }
                    _ => self.step(),
                }
                self.finish();
            }
            if self.running.is_empty() || self.published.elapsed() > PUBLISH {
                self.publish();
            }
        }
        self.publish();
    }

    /// Does what was asked for between steps and admits jobs; waits while there is nothing to do. False:
    /// nothing will come any more.
    fn next_work(&mut self) -> bool {
        self.resume();
        let mut queue = self.shared.queue();
        loop {
            let calls: Vec<Call> = queue.calls.drain(..).collect();
            // Who left the queue frees a place in it.
            let left = |w: &Waiting| w.job.listener.is_gone();
            let gone: Vec<Waiting> = match queue.jobs.iter().any(left) {
                true => {
                    let all = std::mem::take(&mut queue.jobs);
                    let (gone, stay): (Vec<_>, Vec<_>) = all.into_iter().partition(left);
                    queue.jobs = stay.into();
                    gone
                }
                false => Vec::new(),
            };
            let admitted = self.admissible(&mut queue.jobs);
            let idle = calls.is_empty() && gone.is_empty() && admitted.is_empty();
            if idle && self.running.is_empty() {
                let aborted = self.shared.abort.load(Ordering::Relaxed);
                if queue.jobs.is_empty() && (queue.closing || aborted) {
                    return false;
                }
                if self.shared.watched.load(Ordering::Relaxed) {
                    drop(queue);
                    self.publish();
                    queue = self.shared.queue();
                    continue;
                }
                // Jobs whose listeners leave are noticed by the clock.
                let waited = self.shared.bell.wait_timeout(queue, Duration::from_secs(1));
                queue = waited.unwrap_or_else(|e| e.into_inner()).0;
                continue;
            }
            drop(queue);
            calls.into_iter().for_each(|call| call(&mut self.engine));
            for waiting in gone {
                self.shared.load().ended[2] += 1;
                waiting.job.listener.done(Outcome::Gone, Usage::default());
            }
            let any = !admitted.is_empty();
            admitted.into_iter().for_each(|(waiting, room)| self.admit(waiting, room));
            if any {
                self.shared.load().running = self.running.len() + self.paused.len();
            }
            return true;
        }
    }

    /// Answers that have begun and are not over.
    fn begun(&mut self) -> impl Iterator<Item = &mut Running> {
        self.running.iter_mut().chain(&mut self.paused)
    }

    /// Pages that no answer is promised.
    fn free(&self) -> Free {
        Free::of(self.engine.pages_for_all(), self.running.iter().map(|r| &r.room))
    }

    /// Jobs that can be begun now, in their order, with the [room](crate::room) that each is promised. Nobody overtakes:
    /// neither a job that needs more room, nor an answer that pauses.
    fn admissible(&self, jobs: &mut VecDeque<Waiting>) -> Vec<(Waiting, Room)> {
        let mut admitted = Vec::new();
        if !self.paused.is_empty() {
            return admitted;
        }
        let mut free = self.free();
        let mut places = self.sequences.saturating_sub(self.running.len());
        while places > 0
            && let Some(next) = jobs.front()
        {
            let given = next.job.prompt.len();
            let most = given.saturating_add(next.job.max_tokens).min(self.engine.plan.context);
            let positions = given.saturating_add(GROWTH).min(most);
            let pages = self.engine.pages_for(positions);
            if !free.has(&pages) {
                break;
            }
            free.take(&pages);
            let room = Room { positions, pages, most };
            admitted.extend(jobs.pop_front().map(|waiting| (waiting, room)));
            places -= 1;
        }
        admitted
    }

    /// Promises what the next step may need; where there is too little, the youngest pause.
    fn make_room(&mut self) {
        let mut index = 0;
        while let Some(r) = self.running.get(index) {
            // A round computes drafts as well.
            let Some(positions) = r.room.wanted(r.tokens.len() + MOST_TOKENS) else {
                index += 1;
                continue;
            };
            let pages = self.engine.pages_for(positions);
            let others = self.running.iter().filter(|other| other.id != r.id);
            let free = Free::of(self.engine.pages_for_all(), others.map(|other| &other.room));
            if free.has(&pages) {
                let room = &mut self.running[index].room;
                (room.positions, room.pages) = (positions, pages);
                index += 1;
                continue;
            }
            let growing = self.running.iter().enumerate().filter(|(_, r)| !r.room.is_whole());
            let (youngest, _) = growing.max_by_key(|(_, r)| r.id).expect("one that wants room");
            self.pause(youngest);
            index -= usize::from(youngest < index);
        }
    }

    /// Takes an answer's pages; it goes on when there is room for all that it may ask for.
    fn pause(&mut self, index: usize) {
        let mut r = self.running.remove(index);
        if self.pace == Pace::Flowing {
            r.keep_all(&mut self.engine);
        }
        self.engine.release(&mut r.sequence);
        let at = self.paused.partition_point(|other| other.id < r.id);
        self.paused.insert(at, r);
        self.shared.load().pauses += 1;
    }

    /// Goes on with those that paused, oldest first, as far as there is room.
    fn resume(&mut self) {
        while let Some(first) = self.paused.front() {
            let positions = first.room.most;
            let pages = self.engine.pages_for(positions);
            if !self.free().has(&pages) {
                return;
            }
            let Some(mut r) = self.paused.pop_front() else { return };
            r.room = Room { positions, pages, most: positions };
            r.sequence = self.engine.begin_steered(&r.tokens, r.job.steering.clone());
            r.given = r.tokens.len();
            self.running.push(r);
        }
    }

    fn admit(&mut self, Waiting { job, since }: Waiting, room: Room) {
        let queued_s = since.elapsed().as_secs_f64();
        let vocab = self.engine.spec.vocab_size;
        let context = self.engine.plan.context;
        let fault = if job.prompt.is_empty() || job.prompt.len() >= context {
            let prompt = job.prompt.len();
            Some(EngineError::ContextExceeded { prompt, context })
        } else {
            let bad = job.prompt.iter().find(|&&t| t as usize >= vocab);
            bad.map(|&id| EngineError::BadToken { id, vocab })
        };
        let sequence = match fault {
            None => self.engine.begin_steered(&job.prompt, job.steering.clone()),
            Some(_) => self.engine.new_sequence(),
        };
        let usage = Usage {
            prompt: job.prompt.len(),
            cached: sequence.len(),
            queued_s,
            ..Usage::default()
        };
        let mut load = self.shared.load();
        load.cached_tokens += usage.cached as u64;
        load.prompt_tokens += (usage.prompt - usage.cached) as u64;
        drop(load);
        self.next_id += 1;
        self.running.push(Running {
            id: self.next_id,
            sampler: Sampler::new(job.sampling.clone()),
            tokens: job.prompt.to_vec(),
            given: job.prompt.len(),
            sequence,
            usage,
            began: Instant::now(),
            first: None,
            room,
            outcome: match fault {
                Some(e) => Some(Outcome::Failed(e.to_string())),
                None if job.max_tokens == 0 => Some(Outcome::Length),
                None => None,
            },
            job,
        });
    }

    /// One answer runs alone: a round with its drafter, if it drafts.
    fn round(&mut self) {
        let engine = &mut self.engine;
        let (exact, block, context) = (engine.keeps_exactly(), engine.block(), engine.plan.context);
        let r = &mut self.running[0];
        let from = r.sequence.len();
        engine.follow(&r.sequence, &r.tokens[..from]);
        let left = (r.job.max_tokens - r.usage.generated).min(context - r.tokens.len());
        // A state can be kept only where a pass ends.
        let most = if exact { left.min(block - from % block) } else { left };
        let params = r.sampler.params().clone();
        let recent = r.tokens[r.tokens.len().saturating_sub(params.repeat_last)..].to_vec();
        let token = *r.tokens.last().expect("a prompt has tokens");
        let by_lines =
            r.job.constraint.is_none() && r.job.bias.is_empty() && r.job.logprobs.is_none();
        let turn = Turn { token, params: &params, recent: &recent, most, by_lines };
        let known = r.tokens.len();
        let mut chosen: Vec<Choice> = Vec::new();
        let (sequence, listener, mut choosing) = r.parts();
        // A drafter may read a long prompt first: who leaves meanwhile is not kept waiting for.
        let abort = &self.shared.abort;
        let cancel = AtomicBool::new(abort.load(Ordering::Relaxed));
        let mut progress = |_: usize, _: usize| {
            if abort.load(Ordering::Relaxed) || listener.is_gone() {
                cancel.store(true, Ordering::Relaxed);
            }
        };
        let mut control = Control { cancel: &cancel, progress: &mut progress };
        let result = engine.round(sequence, &turn, &mut control, &mut |logits, _| {
            let choice = choosing.choose(logits);
            let next = match &choice {
                Ok((token, false)) if !token.is_end => Chosen::More(token.id),
                Ok((token, _)) => Chosen::Last(token.id),
                // Nothing can follow; the token is of no account.
                Err(_) => Chosen::Last(0),
            };
            choosing.tokens.extend(choice.as_ref().ok().map(|(token, _)| token.id));
            chosen.push(choice);
            Ok(next)
        });
        r.tokens.truncate(known);
        let round = match result {
            Ok(round) => round,
            Err(error) => {
                r.outcome = Some(match error {
                    EngineError::Cancelled if r.job.listener.is_gone() => Outcome::Gone,
                    error => failed(error),
                });
                return;
            }
        };
        let mut used = 0;
        let mut generated = 0;
        for choice in chosen {
            used += 1;
            match choice {
                Ok(choice) => {
                    generated += 1;
                    r.take(choice, context);
                }
                Err(fault) => r.outcome = Some(Outcome::Failed(fault)),
            }
            if r.outcome.is_some() {
                break;
            }
        }
        match engine.settle(&mut r.sequence, round, used) {
            Ok(()) => keep(engine, r, from),
            Err(error) => r.outcome = Some(Outcome::Failed(error.to_string())),
        }
        let mut load = self.shared.load();
        load.steps += 1;
        load.generated_tokens += generated;
    }

    /// Computes a batch and hands out what was chosen.
    fn step(&mut self) {
        if let [one] = &self.running[..] {
            self.engine.follow(&one.sequence, &one.tokens[..one.sequence.len()]);
        }
        let exact = self.engine.keeps_exactly();
        let block = self.engine.block();
        let needs: Vec<Need> = self
            .running
            .iter()
            .map(|r| match r.in_prompt() {
                false => Need::Token,
                true => {
                    let len = r.sequence.len();
                    let cuts = r.job.checkpoints.iter().map(|cut| cut / block * block);
                    // A state can be kept only where a pass ends.
                    let next = cuts.filter(|&cut| exact && cut > len).min();
                    Need::Prompt(next.map_or(r.ahead(), |cut| r.ahead().min(cut - len)))
                }
            })
            .collect();
        let plan = &self.engine.plan;
        let chunk = match self.pace {
            // No step is longer than one whole prompt's.
            Pace::Flowing => plan.chunk.min(plan.context),
            Pace::Full => plan.chunk,
        };
        let rows = share(&needs, chunk, self.turn, self.pace);
        self.turn = self.turn.wrapping_add(1);
        if let Err(error) = self.compute(&rows) {
            self.each_alone(&rows, error);
        }
    }

    /// What one of them brings into a pass may be all that is wrong with it, such as a steering that overflows: each has a pass
    /// of its own, and fails by itself. `error` is what became of the pass of all.
    fn each_alone(&mut self, rows: &[usize], error: EngineError) {
        let cancelled = matches!(error, EngineError::Cancelled);
        let only_one = rows.iter().filter(|&&rows| rows > 0).count() == 1;
        let outcome = failed(error);
        for index in (0..rows.len()).filter(|&index| rows[index] > 0) {
            if self.running[index].outcome.is_some() {
                continue;
            }
            let outcome = if cancelled || only_one {
                outcome.clone()
            } else {
                let mut alone = vec![0; rows.len()];
                alone[index] = rows[index];
                let Err(error) = self.compute(&alone) else { continue };
                failed(error)
            };
            self.running[index].outcome = Some(outcome);
        }
    }

    /// Computes so many rows of each and hands out what was chosen. On an error nothing has happened, but that who has had a
    /// token chosen is failed.
    fn compute(&mut self, rows: &[usize]) -> Result<(), EngineError> {
        let mut batch = Batch::default();
        // Who is in the batch, with its length before, and who of them has a token chosen.
        let mut members = Vec::new();
        let mut chooses = Vec::new();
        let mut lent: Vec<&mut Sequence> = Vec::new();
        let mut choosing: Vec<Choosing<'_>> = Vec::new();
        for (index, (r, &rows)) in self.running.iter_mut().zip(rows).enumerate() {
            if rows == 0 {
                continue;
            }
            let from = r.sequence.len();
            batch.tokens.extend(&r.tokens[from..from + rows]);
            batch.row_sequence.extend(std::iter::repeat_n(members.len() as u32, rows));
            // The last token that is known: what follows it is to be chosen.
            let is_last = rows == r.ahead();
            let (sequence, _, choice) = r.parts();
            if is_last {
                batch.logit_rows.push(batch.tokens.len() as u32 - 1);
                chooses.push(index);
                choosing.push(choice);
            }
            members.push((index, from));
            lent.push(sequence);
        }
        let mut chosen = Vec::with_capacity(chooses.len());
        let mut waiting = choosing.into_iter();
        let mut control = Control { cancel: &self.shared.abort, progress: &mut |_, _| {} };
        let result = self.engine.forward(&batch, &mut lent, &mut control, &mut |_, logits| {
            // Rows come in order, one for each that chooses.
            chosen.extend(waiting.next().map(|mut c| c.choose(&Logits::All(logits))));
            Ok(())
        });
        drop(waiting);
        if let Err(error) = result {
            // Rules that have taken a token cannot give it back.
            for (&index, _) in chooses.iter().zip(&chosen) {
                self.running[index].outcome = Some(Outcome::Failed(error.to_string()));
            }
            return Err(error);
        }
        for (index, from) in members {
            keep(&mut self.engine, &self.running[index], from);
        }
        let mut generated = 0;
        for (index, token) in chooses.into_iter().zip(chosen) {
            match token {
                Ok(choice) => {
                    generated += 1;
                    self.running[index].take(choice, self.engine.plan.context);
                }
                Err(fault) => self.running[index].outcome = Some(Outcome::Failed(fault)),
            }
        }
        let mut load = self.shared.load();
        load.steps += 1;
        load.generated_tokens += generated;
        Ok(())
    }

    /// Lets go of answers that are over.
    fn finish(&mut self) {
        // What pauses and is over is taken as what runs.
        let (over, paused): (Vec<_>, Vec<_>) =
            self.paused.drain(..).partition(|r| r.outcome.is_some());
        self.paused = paused.into();
        self.running.extend(over);
        let mut index = 0;
        let mut any = false;
        while index < self.running.len() {
            let Some(outcome) = self.running[index].outcome.take() else {
                index += 1;
                continue;
            };
            any = true;
            let mut r = self.running.remove(index);
            // A conversation may go on from its answer; requests of a batch do not.
            if !matches!(outcome, Outcome::Failed(_)) && self.pace == Pace::Flowing {
                r.keep_all(&mut self.engine);
            }
            self.engine.release(&mut r.sequence);
            let now = Instant::now();
            let first = r.first.unwrap_or(now);
            r.usage.first_token_s = (first - r.began).as_secs_f64();
            r.usage.decode_s = (now - first).as_secs_f64();
            let mut load = self.shared.load();
            load.running = self.running.len() + self.paused.len();
            load.ended[match outcome {
                Outcome::Stop => 0,
                Outcome::Length => 1,
                Outcome::Gone => 2,
                Outcome::Failed(_) => 3,
            }] += 1;
            drop(load);
            r.job.listener.done(outcome, r.usage);
        }
        if any && self.running.is_empty() {
            self.publish();
        }
    }

    fn publish(&mut self) {
        self.published = Instant::now();
        let stats = self.engine.stats();
        let watched = self.shared.watched.swap(false, Ordering::Relaxed);
        let snapshot = watched.then(|| Arc::new(self.engine.snapshot()));
        let mut load = self.shared.load();
        load.running = self.running.len() + self.paused.len();
        load.paused = self.paused.len();
        load.kept = self.engine.kept();
        load.stats = stats;
        load.speculation = self.engine.speculation().map(|(_, counts, _)| counts);
        if let Some(snapshot) = snapshot {
            load.snapshot = snapshot;
        }
    }
}
