//! One answer: what is known of it, how its tokens are chosen, what is kept of it for later.

use std::time::Instant;

use forebay_engine::prefix::Origin;
use forebay_engine::sampler::log_sum_exp;
use forebay_engine::{Engine, EngineError, Logits, Sampler, Sequence};

use crate::job::{Constraint, Flow, Job, Listener, Outcome, Token, Usage};
use crate::room::Room;

/// Beginnings are kept at multiples of this in long prompts, besides the job's checkpoints.
const KEEP_EVERY: usize = 256;

/// An answer that has begun.
pub(crate) struct Running {
    /// Later ones have larger ones.
    pub id: u64,
    pub job: Job,
    pub sequence: Sequence,
    pub sampler: Sampler,
    /// Prompt and what was chosen; the last is not computed yet.
    pub tokens: Vec<u32>,
    /// How many of them are read before the next is chosen: the prompt, and after a pause what was chosen as well.
    pub given: usize,
    pub usage: Usage,
    pub began: Instant,
    pub first: Option<Instant>,
    pub outcome: Option<Outcome>,
    /// Positions that it has room for.
    pub room: Room,
}

impl Running {
    /// Tokens that are known and not computed.
    pub fn ahead(&self) -> usize {
        self.tokens.len() - self.sequence.len()
    }

    /// Whether tokens are read that were given.
    pub fn in_prompt(&self) -> bool {
        self.sequence.len() < self.given
    }

    /// The sequence, who hears of the tokens, and what choosing them needs: each by itself.
    pub fn parts(&mut self) -> (&mut Sequence, &dyn Listener, Choosing<'_>) {
        let job = &mut self.job;
        let choosing = Choosing {
            sampler: &mut self.sampler,
            tokens: &mut self.tokens,
            constraint: &mut job.constraint,
            bias: &job.bias,
            logprobs: job.logprobs,
            ends: &job.ends,
        };
        (&mut self.sequence, &*job.listener, choosing)
    }

    /// Takes the chosen token; with `over` the answer is whole.
    pub fn take(&mut self, (token, over): (Token, bool), context: usize) {
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

    /// Keeps all that is computed of an answer that ends or pauses.
    pub fn keep_all(&self, engine: &mut Engine) {
        let len = self.sequence.len();
        if len > 0 && !engine.keeps_exactly() {
            engine.keep(&self.sequence, &self.tokens.clone().into(), len, Origin::Prompt);
        }
    }
}

/// A chosen token and whether the rules say that the answer is whole with it; or what went wrong.
pub(crate) type Choice = Result<(Token, bool), String>;

/// What choosing a token needs of a running answer.
pub(crate) struct Choosing<'a> {
    sampler: &'a mut Sampler,
    /// Prompt and what was chosen; whoever chooses several adds them.
    pub tokens: &'a mut Vec<u32>,
    constraint: &'a mut Option<Box<dyn Constraint>>,
    bias: &'a [(u32, f32)],
    logprobs: Option<usize>,
    ends: &'a [u32],
}

impl Choosing<'_> {
    /// The token after all that is known, which the rules then have taken.
    pub fn choose(&mut self, logits: &Logits<'_>) -> Choice {
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

/// Keeps what a pass has added, where others may begin with it.
pub(crate) fn keep(engine: &mut Engine, r: &Running, from: usize) {
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
    let whole = r.job.prompt.len();
    if len >= whole {
        engine.keep(&r.sequence, &r.job.prompt, whole, Origin::Prompt);
    }
}
