//! The steps: admit, form a batch, compute it, choose tokens.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_engine::prefix::Origin;
use forebay_engine::sampler::log_sum_exp;
use forebay_engine::speculate::{Chosen, Turn};
use forebay_engine::{Batch, Control, Engine, EngineError, Logits, Sampler, Sequence};

use crate::job::{Constraint, Flow, Job, Outcome, Token, Usage};
use crate::scheduler::{Call, Pace, SchedulerOptions, Shared, Waiting};
use crate::share::{Need, share};

/// Beginnings are kept at multiples of this in long prompts, besides the job's checkpoints.
const KEEP_EVERY: usize = 256;

/// Counters are published at most this often while steps follow one another.
const PUBLISH: Duration = Duration::from_millis(50);

/// An answer that is computed.
struct Running {
    id: u64,
    job: Job,
    sequence: Sequence,
    sampler: Sampler,
    /// Prompt and what was chosen; the last is not computed yet.
    tokens: Vec<u32>,
    usage: Usage,
    began: Instant,
    first: Option<Instant>,
    outcome: Option<Outcome>,
    /// Pages of the classes that are promised to it until it is over.
    promised: Vec<usize>,
}

impl Running {
    /// Tokens that are known and not computed.
    fn ahead(&self) -> usize {
        self.tokens.len() - self.sequence.len()
    }

    fn in_prompt(&self) -> bool {
        self.sequence.len() < self.job.prompt.len()
    }
}

pub(crate) struct Worker {
    engine: Engine,
    shared: Arc<Shared>,
    sequences: usize,
    pace: Pace,
    running: Vec<Running>,
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
                for r in &mut self.running {
                    r.outcome = Some(Outcome::Failed("the server is shutting down".into()));
                }
                self.finish();
                return;
            }
            for r in self.running.iter_mut().filter(|r| r.job.listener.is_gone()) {
                r.outcome = Some(Outcome::Gone);
            }
            self.finish();
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
            admitted.into_iter().for_each(|(waiting, pages)| self.admit(waiting, pages));
            if any {
                self.shared.load().running = self.running.len();
            }
            return true;
        }
    }

    /// Jobs that can be begun now, in their order, with the pages that each is promised: those of its prompt and of
    /// all tokens that it may ask for. So no answer lacks a page in the middle; and who asks for little takes
    /// little. Nobody overtakes: a long one is not kept waiting by short ones that come after it.
    fn admissible(&self, jobs: &mut VecDeque<Waiting>) -> Vec<(Waiting, Vec<usize>)> {
        let mut left = self.engine.pages_for_all();
        let take = |left: &mut [usize], pages: &[usize]| {
            left.iter_mut().zip(pages).for_each(|(left, n)| *left = left.saturating_sub(*n));
        };
        self.running.iter().for_each(|r| take(&mut left, &r.promised));
        let mut admitted = Vec::new();
        let mut places = self.sequences.saturating_sub(self.running.len());
        while places > 0
            && let Some(next) = jobs.front()
        {
            let positions = next.job.prompt.len().saturating_add(next.job.max_tokens);
            let pages = self.engine.pages_for(positions);
            if pages.iter().zip(&left).any(|(n, left)| n > left) {
                break;
            }
            take(&mut left, &pages);
            admitted.extend(jobs.pop_front().map(|waiting| (waiting, pages)));
            places -= 1;
        }
        admitted
    }

    fn admit(&mut self, Waiting { job, since }: Waiting, promised: Vec<usize>) {
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
            sequence,
            usage,
            began: Instant::now(),
            first: None,
            promised,
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
        let mut control = Control { cancel: &self.shared.abort, progress: &mut |_, _| {} };
        let result = engine.round(&mut r.sequence, &turn, &mut control, &mut |logits, _| {
            let mut choosing = Choosing {
                sampler: &mut r.sampler,
                tokens: &r.tokens,
                constraint: &mut r.job.constraint,
                bias: &r.job.bias,
                logprobs: r.job.logprobs,
                ends: &r.job.ends,
            };
            let choice = choosing.choose(logits);
            let next = match &choice {
                Ok((token, false)) if !token.is_end => Chosen::More(token.id),
                Ok((token, _)) => Chosen::Last(token.id),
                // Nothing can follow; the token is of no account.
                Err(_) => Chosen::Last(0),
            };
            r.tokens.extend(choice.as_ref().ok().map(|(token, _)| token.id));
            chosen.push(choice);
            Ok(next)
        });
        r.tokens.truncate(known);
        let round = match result {
            Ok(round) => round,
            Err(error) => {
                r.outcome = Some(Outcome::Failed(error.to_string()));
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
        let rows = share(&needs, self.engine.plan.chunk, self.turn, self.pace);
        self.turn = self.turn.wrapping_add(1);
        let mut batch = Batch::default();
        // Who is in the batch, with its length before, and who of them has a token chosen.
        let mut members = Vec::new();
        let mut chooses = Vec::new();
        let mut lent: Vec<&mut Sequence> = Vec::new();
        let mut choosing: Vec<Choosing<'_>> = Vec::new();
        for (index, (r, &rows)) in self.running.iter_mut().zip(&rows).enumerate() {
            if rows == 0 {
                continue;
            }
            let from = r.sequence.len();
            batch.tokens.extend(&r.tokens[from..from + rows]);
            batch.row_sequence.extend(std::iter::repeat_n(members.len() as u32, rows));
            // The last token that is known: what follows it is to be chosen.
            if rows == r.ahead() {
                batch.logit_rows.push(batch.tokens.len() as u32 - 1);
                chooses.push(index);
                choosing.push(Choosing {
                    sampler: &mut r.sampler,
                    tokens: &r.tokens,
                    constraint: &mut r.job.constraint,
                    bias: &r.job.bias,
                    logprobs: r.job.logprobs,
                    ends: &r.job.ends,
                });
            }
            members.push((index, from));
            lent.push(&mut r.sequence);
        }
        let mut chosen = Vec::with_capacity(chooses.len());
        let mut choosing = choosing.into_iter();
        let mut control = Control { cancel: &self.shared.abort, progress: &mut |_, _| {} };
        let result = self.engine.forward(&batch, &mut lent, &mut control, &mut |_, logits| {
            // Rows come in order, one for each that chooses.
            chosen.extend(choosing.next().map(|mut c| c.choose(&Logits::All(logits))));
            Ok(())
        });
        drop(choosing);
        if let Err(error) = result {
            for (index, _) in members {
                self.running[index].outcome = Some(Outcome::Failed(error.to_string()));
            }
            return;
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
    }

    /// Lets go of answers that are over.
    fn finish(&mut self) {
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
                let len = r.sequence.len();
                if len > 0 && !self.engine.keeps_exactly() {
                    self.engine.keep(&r.sequence, &r.tokens.clone().into(), len, Origin::Prompt);
                }
            }
            self.engine.release(&mut r.sequence);
            let now = Instant::now();
            let first = r.first.unwrap_or(now);
            r.usage.first_token_s = (first - r.began).as_secs_f64();
            r.usage.decode_s = (now - first).as_secs_f64();
            let mut load = self.shared.load();
            load.running = self.running.len();
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
        load.running = self.running.len();
        load.kept = self.engine.kept();
        load.stats = stats;
        if let Some(snapshot) = snapshot {
            load.snapshot = snapshot;
        }
    }
}

/// A chosen token and whether the rules say that the answer is whole with it; or what went wrong.
type Choice = Result<(Token, bool), String>;

/// What choosing a token needs of a running answer.
struct Choosing<'a> {
    sampler: &'a mut Sampler,
    tokens: &'a [u32],
    constraint: &'a mut Option<Box<dyn Constraint>>,
    bias: &'a [(u32, f32)],
    logprobs: Option<usize>,
    ends: &'a [u32],
}

impl Choosing<'_> {
    /// The token after all that is known, which the rules then have taken.
    fn choose(&mut self, logits: &Logits<'_>) -> Choice {
        let position = self.tokens.len() as u64;
        let nan = || EngineError::LogitNan { position: self.tokens.len() - 1 }.to_string();
        let choice = if self.constraint.is_none() && self.bias.is_empty() {
            self.sampler.choose(logits, self.tokens, position).ok_or_else(nan)?
        } else {
            let mut changed = logits.to_vec();
            for (id, bias) in self.bias {
                if let Some(logit) = changed.get_mut(*id as usize) {
                    *logit += bias;
                }
            }
            if let Some(constraint) = self.constraint {
                constraint.mask(&mut changed)?;
            }
            self.sampler.sample(&changed, self.tokens, position).ok_or_else(nan)?
        };
        let mut token = Token {
            id: choice.token,
            logprob: 0.0,
            top: Vec::new(),
            is_end: self.ends.contains(&choice.token),
        };
        if let Some(n) = self.logprobs {
            let (max, log_sum) = log_sum_exp(logits).ok_or_else(nan)?;
            let of = |logit: f32| (logit as f64 - max as f64 - log_sum) as f32;
            token.logprob = of(logits[choice.token as usize]);
            token.top =
                top(logits, n).into_iter().map(|id| (id, of(logits[id as usize]))).collect();
        }
        let over = match self.constraint {
            Some(constraint) if !token.is_end => constraint.accept(token.id)?,
            _ => false,
        };
        Ok((token, over))
    }
}

/// The `n` ids with the largest logits, best first; the lower id among equals.
fn top(logits: &[f32], n: usize) -> Vec<u32> {
    let n = n.min(logits.len());
    if n == 0 {
        return Vec::new();
    }
    let better =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if n < ids.len() {
        ids.select_nth_unstable_by(n - 1, better);
        ids.truncate(n);
    }
    ids.sort_unstable_by(better);
    ids
}

impl Running {
    /// Takes the chosen token; with `over` the answer is whole.
    fn take(&mut self, (token, over): (Token, bool), context: usize) {
        self.first.get_or_insert_with(Instant::now);
        self.tokens.push(token.id);
        self.usage.generated += 1;
        let flow = self.job.listener.token(&token);
        let full = self.usage.generated >= self.job.max_tokens || self.tokens.len() >= context;
        self.outcome = match over || token.is_end || flow == Flow::Stop {
            true => Some(Outcome::Stop),
            false => full.then_some(Outcome::Length),
        };
    }
}

/// Keeps what a pass has added, where others may begin with it.
fn keep(engine: &mut Engine, r: &Running, from: usize) {
    let (len, block) = (r.sequence.len(), engine.block());
    if engine.keeps_exactly() {
        if !len.is_multiple_of(block) {
            return;
        }
        if len <= r.job.prompt.len() {
            engine.keep(&r.sequence, &r.job.prompt, len, Origin::Prompt);
        } else {
            // The latest state of an answer replaces the one before.
            engine.keep(&r.sequence, &r.tokens[..len].into(), len, Origin::Answer(r.id));
        }
        return;
    }
    if from >= r.job.prompt.len() {
        return;
    }
    let steps = (from / KEEP_EVERY + 1..=len / KEEP_EVERY).map(|n| n * KEEP_EVERY);
    let cuts = r.job.checkpoints.iter().map(|cut| cut / block * block);
    for cut in steps.chain(cuts).filter(|&cut| cut > from && cut <= len) {
        engine.keep(&r.sequence, &r.job.prompt, cut, Origin::Prompt);
    }
    if len >= r.job.prompt.len() {
        engine.keep(&r.sequence, &r.job.prompt, len, Origin::Prompt);
    }
}
