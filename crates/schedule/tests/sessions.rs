//! Session files: the same bits after a restart, and nothing from a file that is not what was written.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{MODELS, engine, prompt};
use forebay_engine::prefix::Origin;
use forebay_engine::{Control, Engine, Sequence};

fn logits(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Vec<u32> {
    let rest = &tokens[sequence.len()..];
    let logits = Control::none(|control| engine.prefill(sequence, rest, control)).unwrap();
    logits.iter().map(|l| l.to_bits()).collect()
}

fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect()
}

#[test]
fn a_restart_changes_no_bit() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let tokens: Arc<[u32]> = prompt(2, 128).into();
        let longer: Vec<u32> = tokens.iter().copied().chain([7, 8, 9]).collect();
        let want = {
            let mut engine = engine(model, |o| o.snapshots = 2);
            let mut sequence = engine.new_sequence();
            logits(&mut engine, &mut sequence, &tokens);
            engine.keep(&sequence, &tokens, 128, Origin::Prompt);
            let want = logits(&mut engine, &mut sequence, &longer);
            assert_eq!(engine.save_sessions(dir.path(), 10).unwrap(), 1);
            // Saving again replaces.
            assert_eq!(engine.save_sessions(dir.path(), 10).unwrap(), 1);
            want
        };
        assert_eq!(files(dir.path()).len(), 1);
        let mut engine = engine(model, |o| o.snapshots = 2);
        let (loaded, faults) = engine.load_sessions(dir.path()).unwrap();
        assert!(loaded == 1 && faults.is_empty(), "{faults:?}");
        let mut sequence = engine.begin(&longer);
        assert_eq!(sequence.len(), 128, "{model}");
        assert!(logits(&mut engine, &mut sequence, &longer) == want, "{model}");
    }
}

#[test]
fn damaged_and_foreign_files_are_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let tokens: Arc<[u32]> = prompt(2, 64).into();
    {
        let mut engine = engine(MODELS[0], |_| {});
        let mut sequence = engine.new_sequence();
        logits(&mut engine, &mut sequence, &tokens);
        engine.keep(&sequence, &tokens, 64, Origin::Prompt);
        engine.save_sessions(dir.path(), 10).unwrap();
    }
    let path = files(dir.path()).pop().unwrap();
    let good = std::fs::read(&path).unwrap();
    let mut engine = engine(MODELS[0], |_| {});
    let mut refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let (loaded, faults) = engine.load_sessions(dir.path()).unwrap();
        assert_eq!((loaded, faults.len(), engine.kept()), (0, 1, 0));
        faults[0].to_string()
    };
    for cut in [0, 5, 19, 20, 100, good.len() / 2, good.len() - 1] {
        assert!(refused(&good[..cut]).contains("cut off"), "{cut}");
    }
    for at in [0, 30, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        refused(&bad);
    }
    let mut huge = good.clone();
    huge[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(refused(&huge).contains("too long"));
    std::fs::write(&path, &good).unwrap();
    assert_eq!(engine.load_sessions(dir.path()).unwrap().0, 1);
    let mut other = common::engine(MODELS[1], |_| {});
    let (loaded, faults) = other.load_sessions(dir.path()).unwrap();
    assert!(loaded == 0 && faults[0].to_string().contains("made with"), "{faults:?}");
    assert_eq!(other.load_sessions(&dir.path().join("absent")).unwrap().0, 0);
}
