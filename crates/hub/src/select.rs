//! Which files of a repository make one model.
//!
//! Repositories hold the same weights several times: other containers, other quantisations, the
//! publisher's own layout in a subfolder. One copy is taken, what was left is told, and where only a
//! person can choose they are asked to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use forebay_files::shards::{ShardName, has_extension};

use crate::error::{HubError, human};
use crate::id::{RepoId, glob, is_glob};
use crate::listing::RepoFile;

/// Extensions of what belongs to a safetensors model beside its weights.
const COMPANIONS: [&str; 5] = ["json", "jinja", "txt", "model", "tiktoken"];
/// Weights in containers that are not read.
const FOREIGN: [&str; 9] =
    ["bin", "pt", "pth", "ckpt", "onnx", "onnx_data", "h5", "msgpack", "mlmodel"];
/// No description or tokenizer is longer; what is longer is weights of another kind.
const MAX_COMPANION_BYTES: u64 = 256 << 20;

/// A container that can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A folder.
    Safetensors,
    /// A file, or the files of a split set.
    Gguf,
}

/// Files left where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// What they are.
    pub what: String,
    /// How many.
    pub files: usize,
    /// Their size.
    pub bytes: u64,
}

/// The chosen files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Their container.
    pub container: Container,
    /// Descriptions and tokenizer.
    pub companions: Vec<RepoFile>,
    /// Weights.
    pub weights: Vec<RepoFile>,
    /// What to open, relative to the repository: a GGUF (the first file of its set) or a folder, empty
    /// for the repository itself. More than one only if a pattern with wildcards asked for more.
    pub models: Vec<String>,
    /// What was not chosen.
    pub skipped: Vec<Skipped>,
}

impl Selection {
    /// All files, small ones first.
    pub fn files(&self) -> Vec<RepoFile> {
        self.companions.iter().chain(&self.weights).cloned().collect()
    }

    /// What to open, in a snapshot's folder.
    pub fn model_paths(&self, snapshot: &Path) -> Vec<PathBuf> {
        let path = |m: &String| match m.is_empty() {
            true => snapshot.to_owned(), // joined, it would end in a slash
            false => snapshot.join(m),
        };
        self.models.iter().map(path).collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.companions.iter().chain(&self.weights).map(|f| f.size).sum()
    }
}

/// Files that only make sense together.
struct Set<'a> {
    /// Path of the first.
    first: String,
    files: Vec<&'a RepoFile>,
}

impl Set<'_> {
    fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.size).sum()
    }

    fn shown(&self) -> String {
        format!("{} ({})", self.first, human(self.bytes()))
    }
}

/// Chooses by a pattern (a part of a path, or with `*` and `?`), or without one the copy that a person
/// would take.
pub fn select(
    repo: &RepoId,
    files: &[RepoFile],
    pattern: Option<&str>,
) -> Result<Selection, HubError> {
    let ggufs = sets(files, "gguf");
    let tensors = sets(files, "safetensors");
    let mut selection = match pattern {
        Some(pattern) => by_pattern(repo, files, pattern, ggufs, tensors)?,
        None => by_default(repo, files, ggufs, tensors)?,
    };
    selection.skipped = skipped(files, &selection);
    Ok(selection)
}

fn by_default(
    repo: &RepoId,
    files: &[RepoFile],
    ggufs: Vec<Set<'_>>,
    tensors: Vec<Set<'_>>,
) -> Result<Selection, HubError> {
    let has = |path: &str| files.iter().any(|f| f.path == path);
    let at_root: Vec<Set<'_>> = tensors.into_iter().filter(|s| !s.first.contains('/')).collect();
    if !at_root.is_empty() && (has("config.json") || ggufs.is_empty()) {
        let indexed = has("model.safetensors.index.json");
        return Ok(folder(files, "", main_sets(at_root, indexed)));
    }
    let mut models: Vec<Set<'_>> = ggufs;
    if models.iter().any(|s| !is_side_file(&s.first)) {
        models.retain(|s| !is_side_file(&s.first));
    }
    match models.len() {
        0 => Err(HubError::NoModel { repo: repo.to_string(), found: foreign(files) }),
        1 => Ok(gguf(models)),
        _ => Err(ambiguous(repo, files, &models)),
    }
}

/// The published weights among sets of one folder: `model*`, as the index or the single file is called.
fn main_sets(sets: Vec<Set<'_>>, indexed: bool) -> Vec<Set<'_>> {
    let is_shards =
        |s: &Set<'_>| s.first.starts_with("model-") && ShardName::parse(&s.first).is_some();
    let is_single = |s: &Set<'_>| s.first == "model.safetensors";
    if indexed && sets.iter().any(is_shards) {
        return sets.into_iter().filter(is_shards).collect();
    }
    if !indexed && sets.iter().any(is_single) {
        return sets.into_iter().filter(is_single).collect();
    }
    if !indexed && sets.iter().any(is_shards) {
        return sets.into_iter().filter(is_shards).collect();
    }
    sets
}

fn by_pattern(
    repo: &RepoId,
    files: &[RepoFile],
    pattern: &str,
    ggufs: Vec<Set<'_>>,
    tensors: Vec<Set<'_>>,
) -> Result<Selection, HubError> {
    let choices = || ggufs.iter().chain(&tensors).map(Set::shown).collect::<Vec<String>>();
    let hits = |sets: &[Set<'_>]| {
        let grade =
            |s: &Set<'_>| s.files.iter().map(|f| grade(pattern, &f.path)).max().unwrap_or(0);
        let best = sets.iter().map(&grade).max().unwrap_or(0);
        let hits = (0..sets.len()).filter(|i| best > 0 && grade(&sets[*i]) == best);
        hits.collect::<Vec<usize>>()
    };
    let (gguf_hits, tensor_hits) = (hits(&ggufs), hits(&tensors));
    if gguf_hits.is_empty() && tensor_hits.is_empty() {
        let (repo, pattern) = (repo.to_string(), pattern.to_owned());
        return Err(HubError::NoMatch { repo, pattern, choices: choices() });
    }
    if gguf_hits.is_empty() {
        // Files of one folder are one model; its description lies beside them.
        let sets = take(tensors, &tensor_hits);
        let dirs: BTreeSet<&str> = sets.iter().map(|s| dir_of(&s.files[0].path)).collect();
        let Some(dir) = dirs.first().filter(|_| dirs.len() == 1) else {
            return Err(ambiguous(repo, files, &sets));
        };
        let dir = dir.to_string();
        return Ok(folder(files, &dir, sets));
    }
    let mut sets = take(ggufs, &gguf_hits);
    if sets.len() > 1 && sets.iter().any(|s| !is_side_file(&s.first)) && !is_glob(pattern) {
        sets.retain(|s| !is_side_file(&s.first));
    }
    if sets.len() > 1 && !is_glob(pattern) {
        return Err(ambiguous(repo, files, &sets));
    }
    Ok(gguf(sets))
}

fn take<'a>(sets: Vec<Set<'a>>, hits: &[usize]) -> Vec<Set<'a>> {
    let all = sets.into_iter().enumerate();
    all.filter(|(i, _)| hits.contains(i)).map(|(_, set)| set).collect()
}

/// How well a path fits: 0 not at all; as a part of it; as a whole word of it (`Q4_K` is none of
/// `Q4_K_M`); as its name.
fn grade(pattern: &str, path: &str) -> u8 {
    let name = path.rsplit('/').next().unwrap_or(path);
    if is_glob(pattern) {
        return u8::from(glob(pattern, path) || glob(pattern, name));
    }
    let (pattern, path, name) = (pattern.to_lowercase(), path.to_lowercase(), name.to_lowercase());
    if pattern == path || pattern == name {
        return 3;
    }
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole = path.match_indices(&pattern).any(|(at, _)| {
        !is_word(path[..at].chars().last()) && !is_word(path[at + pattern.len()..].chars().next())
    });
    if whole { 2 } else { u8::from(path.contains(&pattern)) }
}

fn gguf(sets: Vec<Set<'_>>) -> Selection {
    Selection {
        container: Container::Gguf,
        companions: Vec::new(),
        models: sets.iter().map(|s| s.first.clone()).collect(),
        weights: sets.into_iter().flat_map(|s| s.files).cloned().collect(),
        skipped: Vec::new(),
    }
}

fn folder(files: &[RepoFile], dir: &str, sets: Vec<Set<'_>>) -> Selection {
    let companion = |f: &&RepoFile| {
        let known = COMPANIONS.iter().any(|e| has_extension(name_of(&f.path), e));
        let foreign_index =
            f.path.ends_with(".index.json") && !f.path.ends_with(".safetensors.index.json");
        dir_of(&f.path) == dir && known && !foreign_index && f.size <= MAX_COMPANION_BYTES
    };
    Selection {
        container: Container::Safetensors,
        companions: files.iter().filter(companion).cloned().collect(),
        models: vec![dir.to_owned()],
        weights: sets.into_iter().flat_map(|s| s.files).cloned().collect(),
        skipped: Vec::new(),
    }
}

/// The files of an extension, in sets.
fn sets<'a>(files: &'a [RepoFile], extension: &str) -> Vec<Set<'a>> {
    let mut sets: BTreeMap<String, Vec<&RepoFile>> = BTreeMap::new();
    for file in files.iter().filter(|f| has_extension(name_of(&f.path), extension)) {
        let first = match ShardName::parse(&file.path) {
            Some(shard) => shard.sibling(1),
            None => file.path.clone(),
        };
        sets.entry(first).or_default().push(file);
    }
    sets.into_iter().map(|(first, files)| Set { first, files }).collect()
}

/// What is published beside a GGUF model: projectors of vision models, importance matrices.
fn is_side_file(path: &str) -> bool {
    let name = name_of(path).to_ascii_lowercase();
    name.contains("mmproj") || name.contains("imatrix")
}

fn ambiguous(repo: &RepoId, files: &[RepoFile], sets: &[Set<'_>]) -> HubError {
    let all: Vec<Set<'_>> =
        sets_of_both(files).into_iter().filter(|s| !is_side_file(&s.first)).collect();
    let example = example(sets, &all);
    let choices = sets.iter().map(Set::shown).collect();
    HubError::Ambiguous { repo: repo.to_string(), choices, example }
}

fn sets_of_both(files: &[RepoFile]) -> Vec<Set<'_>> {
    let mut all = sets(files, "gguf");
    all.extend(sets(files, "safetensors"));
    all
}

/// The shortest last part of a name that chooses one set: `Q4_K_M` where publishers write it.
fn example(sets: &[Set<'_>], all: &[Set<'_>]) -> String {
    let chooses = |pattern: &str, first: &str| {
        let grade_of = |s: &Set<'_>| grade(pattern, &s.first);
        let best = all.iter().map(grade_of).max().unwrap_or(0);
        let mut hits = all.iter().filter(|s| grade_of(s) == best);
        hits.next().is_some_and(|s| s.first == first) && hits.next().is_none()
    };
    let preferred = sets.iter().filter(|s| s.first.to_uppercase().contains("Q4_K_M"));
    for set in preferred.chain(sets) {
        let name = name_of(&set.first);
        let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        let stem = match ShardName::parse(name) {
            Some(_) => stem.rsplitn(4, '-').last().unwrap_or(stem),
            None => stem,
        };
        let starts = stem.char_indices().rev().filter(|(_, c)| matches!(c, '-' | '.'));
        let ends = starts.map(|(at, _)| &stem[at + 1..]);
        if let Some(end) = ends.filter(|e| !e.is_empty()).find(|e| chooses(e, &set.first)) {
            return end.to_owned();
        }
    }
    sets.first().map(|s| s.first.clone()).unwrap_or_default()
}

fn foreign(files: &[RepoFile]) -> Vec<String> {
    let is_foreign = |f: &&RepoFile| FOREIGN.iter().any(|e| has_extension(name_of(&f.path), e));
    files.iter().filter(is_foreign).take(8).map(|f| f.path.clone()).collect()
}

/// What was left, in few words: by folder, else by extension.
fn skipped(files: &[RepoFile], selection: &Selection) -> Vec<Skipped> {
    let taken = |f: &RepoFile| {
        selection.companions.iter().chain(&selection.weights).any(|t| t.path == f.path)
    };
    let mut groups: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for file in files.iter().filter(|f| !taken(f)) {
        let (dir, name) = (dir_of(&file.path), name_of(&file.path));
        let what = match (dir.split('/').next(), name.rsplit_once('.')) {
            (Some(top), _) if !top.is_empty() => format!("{top}/"),
            (_, Some((stem, extension))) if !stem.is_empty() => format!("*.{extension}"),
            _ => name.to_owned(),
        };
        let group = groups.entry(what).or_default();
        group.0 += 1;
        group.1 += file.size;
    }
    let mut skipped: Vec<Skipped> =
        groups.into_iter().map(|(what, (files, bytes))| Skipped { what, files, bytes }).collect();
    skipped.sort_by_key(|s| std::cmp::Reverse(s.bytes));
    skipped
}

pub(crate) fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn dir_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RepoFile> {
        let file = |p: &&str| RepoFile { path: p.to_string(), size: 1 << 20, digest: None };
        paths.iter().map(file).collect()
    }

    fn choose(paths: &[&str], pattern: Option<&str>) -> Result<Selection, HubError> {
        select(&RepoId::parse("o/n").unwrap(), &files(paths), pattern)
    }

    fn weights(paths: &[&str], pattern: Option<&str>) -> String {
        match choose(paths, pattern) {
            Ok(s) => {
                let names: Vec<String> = s.weights.into_iter().map(|f| f.path).collect();
                format!("{} [{}]", names.join(" "), s.models.join(" "))
            }
            Err(e) => e.class().to_owned(),
        }
    }

    const GPT: [&str; 12] = [
        ".gitattributes",
        "README.md",
        "config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "original/model.safetensors",
        "original/config.json",
        "metal/model.bin",
        "pytorch_model.bin.index.json",
    ];
    const QUANTS: [&str; 7] = [
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-UD-Q4_K_M.gguf",
        "mmproj-F16.gguf",
        "Q8_0/m-Q8_0-00001-of-00002.gguf",
        "Q8_0/m-Q8_0-00002-of-00002.gguf",
        "m-F16.gguf",
    ];

    #[test]
    fn rows() {
        let shards = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors []";
        let q8 = "Q8_0/m-Q8_0-00001-of-00002.gguf Q8_0/m-Q8_0-00002-of-00002.gguf [Q8_0/m-Q8_0-00001-of-00002.gguf]";
        type Row<'a> = (&'a str, &'a [&'a str], Option<&'a str>, &'a str);
        let rows: &[Row<'_>] = &[
            ("a folder with copies", &GPT, None, shards),
            ("a subfolder", &GPT, Some("original"), "original/model.safetensors [original]"),
            ("quantisations", &QUANTS, None, "Ambiguous"),
            ("a split set is whole", &QUANTS, Some("q8_0"), q8),
            (
                "a whole word goes first",
                &QUANTS,
                Some("UD-Q4_K_M"),
                "m-UD-Q4_K_M.gguf [m-UD-Q4_K_M.gguf]",
            ),
            ("two have the word", &QUANTS, Some("Q4_K_M"), "Ambiguous"),
            ("the name decides", &QUANTS, Some("m-Q4_K_M.gguf"), "m-Q4_K_M.gguf [m-Q4_K_M.gguf]"),
            ("a part is enough", &QUANTS, Some("k_s"), "m-Q4_K_S.gguf [m-Q4_K_S.gguf]"),
            ("not the projector", &QUANTS, Some("F16"), "m-F16.gguf [m-F16.gguf]"),
            (
                "wildcards",
                &QUANTS,
                Some("m-q4*"),
                "m-Q4_K_M.gguf m-Q4_K_S.gguf [m-Q4_K_M.gguf m-Q4_K_S.gguf]",
            ),
            ("nothing fits", &QUANTS, Some("Q2"), "NoMatch"),
            (
                "one GGUF and its projector",
                &["a.gguf", "mmproj.gguf", "config.json"],
                None,
                "a.gguf [a.gguf]",
            ),
            (
                "both containers",
                &["model.safetensors", "config.json", "a.gguf", "b.gguf"],
                None,
                "model.safetensors []",
            ),
            (
                "safetensors that are no model",
                &["lora.safetensors", "a.gguf"],
                None,
                "a.gguf [a.gguf]",
            ),
            (
                "publisher's copy",
                &["config.json", "consolidated.safetensors", "model.safetensors"],
                None,
                "model.safetensors []",
            ),
            ("pickles", &["pytorch_model.bin", "config.json"], None, "NoMatch"),
            ("nothing", &[], None, "NoMatch"),
        ];
        for (row, paths, pattern, want) in rows {
            assert_eq!(&weights(paths, *pattern), want, "{row}");
        }
    }

    #[test]
    fn what_goes_with_it_and_what_does_not() {
        let s = choose(&GPT, None).unwrap();
        let companions: Vec<&str> = s.companions.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(
            companions,
            [
                "config.json",
                "chat_template.jinja",
                "tokenizer.json",
                "model.safetensors.index.json"
            ]
        );
        let skipped: Vec<&str> = s.skipped.iter().map(|s| s.what.as_str()).collect();
        assert!(skipped.contains(&"original/") && skipped.contains(&"metal/"), "{skipped:?}");
        let s = choose(&GPT, Some("original")).unwrap();
        assert_eq!(s.companions[0].path, "original/config.json");
    }

    #[test]
    fn the_example_chooses() {
        let Err(HubError::Ambiguous { choices, example, .. }) = choose(&QUANTS, None) else {
            panic!("must ask")
        };
        assert_eq!(choices.len(), 5);
        assert!(
            choices.contains(&"Q8_0/m-Q8_0-00001-of-00002.gguf (2.0 MiB)".to_owned()),
            "{choices:?}"
        );
        assert!(choose(&QUANTS, Some(&example)).is_ok(), "{example}");
        let Err(e) = choose(&["a-Q4_K_M.gguf", "a-Q8_0.gguf"], None) else { panic!("must ask") };
        assert!(e.to_string().contains("o/n:Q4_K_M"), "{e}");
    }
}
