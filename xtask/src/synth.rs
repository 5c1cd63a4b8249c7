//! `cargo xtask synth NAME OUT [--layers N] [--sparse] [--models DIR]`

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use forebay_synth::{NAMES, Options, write};

/// Writes a checkpoint of a published shape with random weights.
pub fn run(args: Vec<String>) -> anyhow::Result<()> {
    let mut options = Options::default();
    let mut models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let mut plain = Vec::new();
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--sparse" => options.sparse = true,
            "--layers" => {
                let n = args.next().context("--layers takes a number")?;
                options.layers = Some(n.parse().context("--layers takes a number")?);
            }
            "--models" => models = args.next().context("--models takes a folder")?.into(),
            other if other.starts_with("--") => bail!("no option {other}"),
            _ => plain.push(arg),
        }
    }
    let [name, out] = plain.as_slice() else {
        bail!(
            "usage: cargo xtask synth NAME OUT [--layers N] [--sparse]\n  NAME: {}",
            NAMES.join(", ")
        );
    };
    let mut shown = 0;
    write(name, &models, &PathBuf::from(out), options, &mut |done, total| {
        let percent = done * 100 / total.max(1);
        if percent > shown {
            shown = percent;
            eprint!("\r{name}: {percent}%");
        }
    })?;
    eprintln!("\r{name}: written to {out}");
    Ok(())
}
