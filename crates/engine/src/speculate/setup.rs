//! Which drafter a model gets, what that takes, and making it.

use std::sync::Arc;

use forebay_cpu::Pool;
use forebay_cpu::backend::{CpuBackend, CpuBytes, CpuShape};
use forebay_files::{Catalog, FileAccess, FileEntry};
use forebay_models::{BlockDrafter, ModelSpec};
use forebay_program::Extras;

use crate::device;
use crate::engine::{Engine, Opened};
use crate::error::EngineError;
use crate::options::{EngineOptions, ResidencyChoice};
use crate::pilot::Prefetch;
use crate::plan::sequence_memory;
use crate::speculate::dflash::Dflash;
use crate::speculate::model::DraftModel;
use crate::speculate::mtp::Mtp;
use crate::speculate::ngram::Ngram;
use crate::speculate::scripted::Scripted;
use crate::speculate::{Drafter, DrafterChoice, MOST_TOKENS, Speculation};

/// Rows of a pass of a draft model: prompts are read in pieces of it.
const DRAFT_CHUNK: usize = 64;

/// Decides what `auto` means, and refuses what cannot be.
pub(crate) fn resolve(options: &mut EngineOptions, spec: &ModelSpec) -> Result<(), EngineError> {
    let has_block = spec.multi_token.is_some();
    if options.speculate.drafter == DrafterChoice::Auto {
        options.speculate.drafter = match has_block {
            // Nothing is asked for by name, so nothing is refused: a GPU takes no rows back.
            _ if device::is_likely(options) || !options.capture.is_empty() => DrafterChoice::Off,
            true => DrafterChoice::Mtp,
            false => DrafterChoice::Ngram,
        };
    }
    if !options.capture.is_empty() && options.speculate.drafter != DrafterChoice::Off {
        // Rows that are taken back would be captured.
        return Err(EngineError::Refused {
            what: "--capture while something drafts".into(),
            instead: "what comes out is the same without; give --speculate off".into(),
        });
    }
    let speculate = &options.speculate;
    let refused =
        |what: String, instead: &str| Err(EngineError::Refused { what, instead: instead.into() });
    match &speculate.drafter {
        DrafterChoice::Mtp if !has_block => refused(
            "--speculate mtp".into(),
            "these files have no multi-token-prediction block, or a converter dropped it; \
             choose ngram or draft",
        ),
        DrafterChoice::Scripted(script) if script.with_block && !has_block => refused(
            "a script beside the model's own block".into(),
            "these files have no multi-token-prediction block",
        ),
        _ => match speculate.tokens {
            Some(n) if n == 0 || n > MOST_TOKENS => refused(
                format!("a draft of {n} tokens"),
                "give --draft-tokens from 1 to 15, or --speculate off",
            ),
            _ => Ok(()),
        },
    }
}

/// Whether the model's own block is run.
pub(crate) fn runs_block(options: &EngineOptions) -> bool {
    match &options.speculate.drafter {
        DrafterChoice::Mtp => true,
        DrafterChoice::Scripted(script) => script.with_block,
        _ => false,
    }
}

/// What the program has to have for the drafter.
pub(crate) fn extras(options: &EngineOptions, block: Option<&BlockFiles>) -> Extras {
    Extras {
        multi_token: runs_block(options),
        kept_layers: block.map_or(Vec::new(), |block| block.drafter.taps.clone()),
        block: block.map(|block| block.drafter.clone()),
        ..Extras::default()
    }
}

/// A block drafter, whose files come behind those of the model.
pub struct BlockFiles {
    /// Described.
    pub drafter: BlockDrafter,
    /// Its files.
    pub files: Vec<FileEntry>,
}

/// The block drafter's headers, where one is asked for; `files` is how many files the model has.
pub(crate) fn open_block(
    access: &dyn FileAccess,
    options: &mut EngineOptions,
    target: &ModelSpec,
    files: u32,
) -> Result<Option<Box<BlockFiles>>, EngineError> {
    let DrafterChoice::Dflash(path) = &options.speculate.drafter else { return Ok(None) };
    if options.also.is_some() {
        return Err(EngineError::Refused {
            what: "--also with --speculate dflash".into(),
            instead: "the second copy has no drafter; leave one of both out".into(),
        });
    }
    let catalog = Catalog::open(path)?;
    let mut drafter = forebay_models::dflash::read(access, &catalog, target)?;
    drafter.shift_files(files);
    let most = drafter.block_size - 1;
    options.speculate.tokens = Some(options.speculate.tokens.map_or(most, |n| n.min(most)));
    Ok(Some(Box::new(BlockFiles { drafter, files: catalog.files })))
}

/// The draft model's headers, where one is asked for.
pub(crate) fn open_model(
    options: &EngineOptions,
    target: &ModelSpec,
) -> Result<Option<Box<Opened>>, EngineError> {
    let DrafterChoice::Model(path) = &options.speculate.drafter else { return Ok(None) };
    let own = EngineOptions {
        residency: ResidencyChoice::Resident,
        threads: options.threads,
        chunk: Some(DRAFT_CHUNK),
        precision: options.precision,
        kv: options.kv,
        io: options.io,
        io_engine: options.io_engine,
        prefetch: Prefetch::Off,
        elastic: false,
        level: options.level,
        ..EngineOptions::default()
    };
    let opened = Opened::open(path, own)?;
    let [mine, theirs] = [target, &opened.spec].map(|spec| spec.vocab_size);
    // Vocabularies are padded, and not always alike.
    if mine.abs_diff(theirs) > mine / 32 {
        return Err(EngineError::Refused {
            what: format!("drafting with {}", path.display()),
            instead: format!(
                "its vocabulary has {theirs} tokens and the model's {mine}: a draft model needs the same tokenizer"
            ),
        });
    }
    Ok(Some(Box::new(opened)))
}

impl Opened {
    /// As a draft model: with so much context, all resident.
    fn draft_shape(&self, context: usize) -> (CpuShape, usize) {
        let context = context.min(self.spec.context_length);
        let chunk = DRAFT_CHUNK.min(context);
        let o = &self.options;
        let (kv_pages, states) = sequence_memory(&self.program, o, chunk, context);
        (CpuShape { max_rows: chunk, kv_type: o.kv(), kv_pages, states, tape_rows: 0 }, context)
    }

    /// Bytes that it takes as a draft model.
    pub(crate) fn draft_bytes(&self, context: usize) -> u64 {
        let (shape, _) = self.draft_shape(context);
        let CpuBytes { trunk, vectors, kv, state, scratch, draft } =
            CpuBackend::bytes(&self.program, &shape);
        trunk
            + vectors
            + kv
            + state
            + scratch
            + draft
            + self.store.resident_bytes()
            + self.plan_input().host_bytes(shape.max_rows)
            + self.plan_input().description_bytes()
    }

    fn load_draft(mut self, context: usize, pool: &Arc<Pool>) -> Result<Engine, EngineError> {
        let (_, context) = self.draft_shape(context);
        self.options.context = Some(context);
        // The target's plan has room for it: what it takes is a line there.
        let plan = self.plan_input().plan(u64::MAX >> 8)?;
        Engine::load_on_cpu(self, plan, pool.clone(), None, &mut |_, _| {})
    }
}

/// Bytes of the drafter besides what the backend allocates for it; 0 where nothing drafts.
pub(crate) fn host_bytes(
    options: &EngineOptions,
    spec: &ModelSpec,
    draft: Option<&Opened>,
    max_rows: usize,
    context: usize,
) -> u64 {
    let block = match runs_block(options) {
        true => Mtp::host_bytes(spec.hidden_size, context, max_rows),
        false => 0,
    };
    options.speculate.host_bytes(context) + block + draft.map_or(0, |d| d.draft_bytes(context))
}

/// The drafter of a model that is loaded.
pub(crate) fn build(
    engine: &Engine,
    options: &EngineOptions,
    (draft, beside): (Option<Box<Opened>>, Option<Box<BlockFiles>>),
    pool: &Arc<Pool>,
) -> Result<Option<Box<Speculation>>, EngineError> {
    let context = engine.plan.context;
    let max_rows = engine.plan.shape.max_rows;
    let classes = engine.program.kv_windows.len();
    let block = || Box::new(Mtp::new(engine.spec.hidden_size, classes, context, max_rows));
    let drafter: Box<dyn Drafter> = match (&options.speculate.drafter, draft) {
        (DrafterChoice::Off | DrafterChoice::Auto, _) => return Ok(None),
        (DrafterChoice::Ngram, _) => Box::new(Ngram),
        (DrafterChoice::Mtp, _) => block(),
        (DrafterChoice::Model(_), Some(opened)) => {
            Box::new(DraftModel::new(Box::new(opened.load_draft(context, pool)?)))
        }
        (DrafterChoice::Model(_), None) => unreachable!("opened with the model"),
        (DrafterChoice::Dflash(_), _) => {
            let block = beside.expect("opened with the model");
            Box::new(Dflash::new(&block.drafter, classes, context))
        }
        (DrafterChoice::Scripted(script), _) => {
            let beside = script.with_block.then(|| block() as Box<dyn Drafter>);
            Box::new(Scripted::new(script.clone(), beside))
        }
    };
    Ok(Some(Box::new(Speculation::new(drafter, &options.speculate, max_rows))))
}
