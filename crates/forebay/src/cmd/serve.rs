//! `serve`: the HTTP server.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use forebay_engine::{Contexts, EngineError, session};
use forebay_models::Layer;
use forebay_schedule::{Pace, Scheduler, SchedulerOptions};
use forebay_serve::room::{Demand, ledger};
use forebay_serve::{HttpOptions, ModelInfo, Service, Tls, usual_sampling};
use forebay_store::memory::PeakSampler;
use forebay_text::Tokenizer;

use crate::args::{LogArg, SamplingArgs, ServeArgs};
use crate::failure::usage;
use crate::model::{self, Loaded};
use crate::term::{interruption, note, say};

/// Most session files that are written.
const MAX_SESSIONS: usize = 32;
/// Answers at once where nothing is told.
const PARALLEL: usize = 4;
/// What the memory plan takes for the context where nothing is told.
const DEFAULT_CONTEXT: usize = 4096;

pub fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    forebay_store::heap::settle();
    args.sampling.params(None)?;
    let keys = match &args.api_keys {
        None => Vec::new(),
        Some(path) => {
            let shown = path.display();
            let text = std::fs::read_to_string(path).map_err(|e| usage(format!("{shown}: {e}")))?;
            let lines = text.lines().map(str::trim);
            let keys: Vec<String> = lines
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .map(str::to_owned)
                .collect();
            if keys.is_empty() {
                return Err(usage(format!("{shown} holds no key: write one a line")));
            }
            keys
        }
    };
    let parallel = args.parallel.unwrap_or(PARALLEL);
    if parallel == 0 {
        return Err(usage("--parallel must be at least 1"));
    }
    if args.connections == 0 {
        return Err(usage("--connections must be at least 1"));
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Tls::load(cert, key).map_err(usage)?),
        _ => None,
    };
    if let Some(dir) = &args.sessions {
        // Told now, not when the server ends and has something to keep.
        session::check_folder(dir)
            .map_err(|e| usage(format!("--sessions: {e}; name a folder that can be written")))?;
    }
    log(args.log_format);
    if args.contexts == Some(0) {
        return Err(usage("--contexts must be at least 1"));
    }
    let load = Load {
        parallel,
        contexts: contexts(args.contexts, args.parallel),
        needs: None,
        queue: args.queue,
        room: Demand {
            max_body: Some(args.max_body),
            connections: args.connections,
            constrained: parallel,
        },
        pace: Pace::Flowing,
        steers_all: false,
        quiet: false,
    };
    let (mut service, loaded) = service(&args.model, &args.sampling, load, args.name)?;
    if args.log_prompts {
        service.log_prompts();
    }
    let service = Arc::new(service);
    if let Some(dir) = args.sessions.clone() {
        let found = service.scheduler().with_engine(move |engine| engine.load_sessions(&dir));
        let (loaded, faults) = found.map_err(|_| anyhow::anyhow!("the engine is gone"))??;
        note!("note: {loaded} sessions are back");
        faults.iter().for_each(|fault| note!("note: {fault}"));
        let dir = args.sessions.clone().expect("it was just there");
        service.scheduler().at_end(move |engine| match engine.save_sessions(&dir, MAX_SESSIONS) {
            Ok(saved) => note!("note: {saved} sessions are saved"),
            Err(fault) => note!("note: sessions are not saved: {fault}"),
        });
    }
    let options = HttpOptions {
        listen: args.listen,
        keys,
        cors: args.cors,
        max_connections: args.connections,
        unread: Duration::from_secs(args.unread),
        max_body_bytes: args.max_body,
        grace: Duration::from_secs(args.grace),
        tls,
        ..HttpOptions::default()
    };
    if !options.listen.ip().is_loopback() && options.keys.is_empty() {
        note!(
            "note: listening beyond this machine without --api-keys: everybody who reaches it may ask"
        );
    }
    let cancel = interruption();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Who renders and encodes prompts: as many prompts take memory at once.
        .max_blocking_threads(2)
        .enable_all()
        .build()
        .context("starting the threads of the server")?;
    let listen = options.listen;
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let served = service.clone();
    let result = runtime.block_on(async move {
        let ended = async move {
            while !cancel.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            note!("ending: running answers are finished; Ctrl-C again ends at once");
        };
        let listening = |address: std::net::SocketAddr| {
            // Programs wait for this line.
            let _ = say!("listening on {scheme}://{address}");
        };
        forebay_serve::serve(served, options, listening, ended).await
    });
    result.map_err(|e| anyhow::Error::new(e).context(format!("listening on {listen}")))?;
    service.scheduler().join();
    drop(loaded);
    Ok(ExitCode::SUCCESS)
}

/// See [`Load::needs`].
pub type Needs = Box<dyn FnOnce(&Tokenizer) -> Vec<usize>>;

/// How much may be asked at once.
pub struct Load {
    /// Answers that are computed at once.
    pub parallel: usize,
    /// Whole contexts that there is room for.
    pub contexts: Contexts,
    /// Tells the positions of the answers that will run at once, longest first, where they are known.
    pub needs: Option<Needs>,
    /// Requests that may wait.
    pub queue: usize,
    /// What takes memory besides.
    pub room: Demand,
    /// Whether somebody reads along.
    pub pace: Pace,
    /// Whether steering vectors with a name act on requests that do not name them.
    pub steers_all: bool,
    /// Whether nothing is said of the memory plan.
    pub quiet: bool,
}

/// Room for contexts as `--contexts` and `--parallel` ask for it. Who names neither wants a plan that works.
pub fn contexts(contexts: Option<usize>, parallel: Option<usize>) -> Contexts {
    match (contexts, parallel) {
        (Some(n), _) => Contexts::Exactly(n),
        (None, Some(_)) => Contexts::Each,
        (None, None) => Contexts::Fitting,
    }
}

/// A model that answers many at once. The second value lives as long as peak memory is to be measured.
pub fn service(
    model: &crate::args::ModelArgs,
    sampling: &SamplingArgs,
    load: Load,
    name: Option<String>,
) -> anyhow::Result<(Service, Option<PeakSampler>)> {
    let Load { parallel, contexts, needs, queue, room, pace, steers_all, quiet } = load;
    let loaded = model::load_with(model, |options, tokenizer| {
        options.sequences = parallel;
        options.contexts = contexts;
        options.needs = needs.map_or(Vec::new(), |needs| needs(tokenizer));
        options.snapshots = parallel.min(4) * 2;
        let context = options.context.unwrap_or(DEFAULT_CONTEXT);
        options.caller_lines = ledger(&room, tokenizer.vocab_size(), context);
    })?;
    let Loaded { mut engine, tokenizer, template, recommended, peak, warm, .. } = loaded;
    warm.recall(&mut engine);
    let mut ends = engine.spec.eos_ids.clone();
    ends.extend(tokenizer.eos_ids());
    ends.sort_unstable();
    ends.dedup();
    let files = engine.files();
    let bytes = (0..files.len() as u32).map(|file| files.entry(file).len).sum();
    let path = model.model.clone();
    let name = name.unwrap_or_else(|| {
        let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
        stem.map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
    });
    let modified = std::fs::metadata(&path).and_then(|m| m.modified()).ok();
    let modified = modified.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    let layers = &engine.spec.layers;
    let routed = || {
        let experts = |(i, layer): (usize, &Layer)| {
            Some((i, layer.ffn.routed.as_ref()?.router.weight.weight.rows))
        };
        layers.iter().enumerate().filter_map(experts)
    };
    let info = ModelInfo {
        name,
        family: engine.spec.family.to_string(),
        bytes,
        created: modified.map_or(0, |d| d.as_secs()),
        context: engine.plan.context,
        vocab: engine.spec.vocab_size,
        experts: routed().map(|(_, experts)| experts).max().unwrap_or(0),
        routed_layers: routed().map(|(layer, _)| layer).collect(),
        budget: engine.plan.budget,
        device_bytes: engine.plan.device.as_ref().map_or(0, |device| device.ledger.total()),
        ledger: engine.plan.ledger.items.iter().map(|item| (item.what, item.bytes)).collect(),
    };
    let steer = engine.steer_vectors().clone();
    let steering = match steers_all {
        true => steer.all(),
        false => steer.choose([]).map_err(EngineError::from)?,
    };
    let defaults = sampling.over(recommended.as_ref(), usual_sampling())?;
    if !quiet {
        note!("{}", engine.plan.summary());
    }
    if let (Contexts::Fitting, room) = (contexts, engine.plan.contexts)
        && room < parallel
    {
        note!(
            "note: room for {room} of {parallel} whole contexts, so that experts keep their memory: answers that ask \
             for few tokens share it; --parallel or --contexts asks for more"
        );
    }
    let options = SchedulerOptions { sequences: parallel, queue, pace };
    let scheduler = Scheduler::start(engine, options).context("starting the engine's thread")?;
    scheduler.at_end(move |engine| warm.remember(engine));
    let mut service = Service::new(info, scheduler, tokenizer, template, ends, defaults);
    service.steer(steer, steering);
    Ok((service, peak))
}

/// Lines of the log go to stderr, events of other parts of the program among them.
fn log(format: LogArg) {
    let lines = || {
        tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_writer(std::io::stderr)
    };
    // It fails where there is a subscriber already, which then hears everything.
    let _ = match format {
        LogArg::Off => return,
        LogArg::Text => lines().with_ansi(false).try_init(),
        LogArg::Json => lines().json().flatten_event(true).with_current_span(false).try_init(),
    };
}
