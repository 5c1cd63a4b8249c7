//! Kept beginnings on disk, so that they survive a restart. The format: `docs/design/010-sessions.md`.
//!
//! A file holds the tokens, pages and state of one beginning. It is only good for the model, precision and KV
//! type that it was made with, and says which these were; with these it gives the same bits as computing it
//! again. Everything in it is covered by a hash, so a file that was cut off or changed is not used.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::prefix::Origin;
use crate::state::Snapshot;

const MAGIC: &[u8; 16] = b"forebay session\n";
/// Of a beginning that was not steered.
const VERSION: u32 = 1;
/// Of one that was: who knows only the first version must not take it for the other kind.
const VERSION_STEERED: u32 = 2;
const EXTENSION: &str = "session";
/// Bytes of each end of a model's file that are part of its identity.
const IDENTITY_BYTES: u64 = 1 << 20;
/// A header is not longer: a million tokens take less.
const MAX_HEADER_BYTES: u32 = 16 << 20;
const HASH_BYTES: usize = 32;

/// Why a session file could not be used or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The system refused.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        error: std::io::Error,
    },
    /// Not what was written.
    #[error("{}: {what}; it is not used and may be deleted", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// Made with another model or other numbers.
    #[error("{}: made with {found}, and this is {wanted}", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What it is for.
        found: String,
        /// What would do.
        wanted: String,
    },
    /// The model's files could not be read.
    #[error(transparent)]
    Model(#[from] forebay_store::StoreError),
}

/// Makes the folder if there is none, and fails if nothing can be written there or read from there.
pub fn check_folder(dir: &Path) -> Result<(), SessionError> {
    let io = |error| SessionError::Io { path: dir.to_owned(), error };
    std::fs::create_dir_all(dir).map_err(io)?;
    session_files(dir).map_err(io)?;
    let probe = dir.join(format!(".{}.partial", std::process::id()));
    let write = || std::fs::write(&probe, MAGIC).and_then(|()| std::fs::remove_file(&probe));
    write().map_err(|error| SessionError::Io { path: probe.clone(), error })
}

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    /// Hash over sizes and both ends of the model's files.
    model: String,
    /// Precision and KV type.
    numbers: String,
    tokens: Vec<u32>,
    /// How it was steered: a hash over vectors, modes and strengths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    steering: Option<String>,
    /// First page that is there, per class; the last is the last of the tokens.
    first_pages: Vec<usize>,
    /// Bytes of all pages and the state.
    body_bytes: u64,
}

impl Engine {
    /// What the model's files are: a hash over their sizes and both ends.
    pub fn identity(&self) -> Result<String, SessionError> {
        let mut hasher = blake3::Hasher::new();
        let files = self.files();
        for file in 0..files.len() as u32 {
            let len = files.entry(file).len;
            hasher.update(&len.to_le_bytes());
            let n = len.min(IDENTITY_BYTES);
            for offset in [0, len - n] {
                let mut bytes = vec![0; n as usize];
                let extent = forebay_models::Extent { file, offset, len: n };
                files.read_exact_at(extent, &mut bytes)?;
                hasher.update(&bytes);
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    fn numbers_text(&self) -> String {
        format!("{:?} with {:?} keys and values", self.numbers.precision, self.numbers.kv)
    }

    /// Writes what is kept into a folder, the most lately used first, at most `most` files; older session
    /// files of the folder go. Gives how many were written.
    pub fn save_sessions(&self, dir: &Path, most: usize) -> Result<usize, SessionError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |error| SessionError::Io { path, error }
        };
        std::fs::create_dir_all(dir).map_err(io(dir))?;
        let model = self.identity()?;
        let mut written = Vec::new();
        // Where states are exact or windows have gone on, a shorter beginning serves what a longer one does not.
        let all = self.keeps_exactly() || self.program.kv_windows.iter().any(Option::is_some);
        for (tokens, snapshot) in self.prefixes.latest(all).into_iter().take(most) {
            let Some(bytes) = self.session(&model, tokens, snapshot) else { break };
            let name = format!("{}.{EXTENSION}", &hash_of(&bytes).to_hex()[..32]);
            let path = dir.join(&name);
            let partial = path.with_extension("partial");
            let write = || -> std::io::Result<()> {
                let mut file = std::fs::File::create(&partial)?;
                file.write_all(&bytes)?;
                file.sync_all()?;
                std::fs::rename(&partial, &path)
            };
            write().map_err(io(&path))?;
            written.push(name);
        }
        for path in session_files(dir).map_err(io(dir))? {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            if !name.is_some_and(|name| written.contains(&name)) {
                std::fs::remove_file(&path).map_err(io(&path))?;
            }
        }
        Ok(written.len())
    }

    /// Reads the session files of a folder, as far as there is room. Gives how many are kept now, and why
    /// others are not. A folder that does not exist holds none.
    pub fn load_sessions(
        &mut self,
        dir: &Path,
    ) -> Result<(usize, Vec<SessionError>), SessionError> {
        let files = match session_files(dir) {
            Ok(files) => files,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(SessionError::Io { path: dir.to_owned(), error }),
        };
        let model = self.identity()?;
        let mut faults = Vec::new();
        let mut loaded = 0;
        for path in files {
            match self.load_session(&model, &path) {
                Ok(true) => loaded += 1,
                // No more room.
                Ok(false) => break,
                Err(fault) => faults.push(fault),
            }
        }
        Ok((loaded, faults))
    }

    /// The bytes of a file. None: the backend saves nothing.
    fn session(&self, model: &str, tokens: &[u32], snapshot: &Snapshot) -> Option<Vec<u8>> {
        let (tables, state) = snapshot.parts();
        let first_pages = snapshot.first_pages();
        let mut body = Vec::new();
        for (class, (table, first)) in tables.iter().zip(&first_pages).enumerate() {
            for &page in &table[*first..] {
                self.backend.save_page(class, page, &mut body).then_some(())?;
            }
        }
        if self.keeps_exactly() {
            self.backend.save_state(state, &mut body).then_some(())?;
        }
        let header = Header {
            version: if snapshot.steering().is_some() { VERSION_STEERED } else { VERSION },
            model: model.to_owned(),
            numbers: self.numbers_text(),
            tokens: tokens.to_vec(),
            steering: snapshot.steering().map(|key| blake3::Hash::from(key).to_hex().to_string()),
            first_pages,
            body_bytes: body.len() as u64,
        };
        let header = serde_json::to_vec(&header).expect("a header is plain data");
        let mut bytes = MAGIC.to_vec();
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header);
        bytes.extend(body);
        let hash = blake3::hash(&bytes);
        bytes.extend(hash.as_bytes());
        Some(bytes)
    }

    fn load_session(&mut self, model: &str, path: &Path) -> Result<bool, SessionError> {
        let damaged = |what| SessionError::Damaged { path: path.to_owned(), what };
        let io = |error| SessionError::Io { path: path.to_owned(), error };
        let mut file = std::fs::File::open(path).map_err(io)?;
        let mut start = [0; MAGIC.len() + 4];
        file.read_exact(&mut start).map_err(|_| damaged("it is cut off"))?;
        let (magic, len) = start.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(damaged("it is no session file"));
        }
        let len = u32::from_le_bytes(len.try_into().expect("four bytes"));
        if len > MAX_HEADER_BYTES {
            return Err(damaged("its header is too long"));
        }
        let mut header = vec![0; len as usize];
        file.read_exact(&mut header).map_err(|_| damaged("it is cut off"))?;
        let parsed: Header =
            serde_json::from_slice(&header).map_err(|_| damaged("its header does not parse"))?;
        let found =
            format!("{} of model {}", parsed.numbers, &parsed.model.get(..8).unwrap_or("?"));
        if parsed.model != model
            || parsed.numbers != self.numbers_text()
            || ![VERSION, VERSION_STEERED].contains(&parsed.version)
        {
            let wanted = format!("{} of model {}", self.numbers_text(), &model[..8]);
            return Err(SessionError::Other { path: path.to_owned(), found, wanted });
        }
        let key = parsed.steering.as_deref().map(blake3::Hash::from_hex).transpose();
        let steering = key.map_err(|_| damaged("its steering is no hash"))?.map(blake3::Hash::into);
        if steering.is_some() != (parsed.version == VERSION_STEERED) {
            return Err(damaged("its version does not say how it was steered"));
        }
        // From here on the shape is known, and with it how long the body must be.
        let block = self.block();
        let tokens = parsed.tokens.len();
        let classes = self.program.kv_windows.len();
        let fits = tokens > 0
            && tokens.is_multiple_of(block)
            && parsed.first_pages.len() == classes
            && parsed.first_pages.iter().all(|first| *first <= tokens / block);
        if !fits {
            return Err(damaged("its shape is not this model's"));
        }
        if tokens >= self.plan.context {
            return Ok(true);
        }
        let mut probe = Vec::new();
        let mut page_bytes = Vec::new();
        for class in 0..classes {
            probe.clear();
            self.backend.save_page(class, 0, &mut probe);
            page_bytes.push(probe.len());
        }
        let pages = parsed.first_pages.iter().map(|first| tokens / block - first);
        let mut want: usize = pages.zip(&page_bytes).map(|(n, bytes)| n * bytes).sum();
        if self.keeps_exactly() {
            probe.clear();
            self.backend.save_state(0, &mut probe);
            want += probe.len();
        }
        if parsed.body_bytes != want as u64 {
            return Err(damaged("its length is not this model's"));
        }
        let mut body = vec![0; want];
        let mut hash = [0; HASH_BYTES];
        file.read_exact(&mut body).map_err(|_| damaged("it is cut off"))?;
        file.read_exact(&mut hash).map_err(|_| damaged("it is cut off"))?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&start).update(&header).update(&body);
        if hasher.finalize() != hash {
            return Err(damaged("its hash does not match"));
        }
        let Some(snapshot) =
            Snapshot::allocate(&mut self.pages, tokens, &parsed.first_pages, steering)
        else {
            return Ok(false);
        };
        if let Err(error) = self.lend() {
            snapshot.release(&mut self.pages);
            return Err(error.into());
        }
        let (tables, state) = snapshot.parts();
        let mut rest = body.as_slice();
        let mut whole = true;
        for (class, (table, first)) in tables.iter().zip(&parsed.first_pages).enumerate() {
            for &page in &table[*first..] {
                let (head, tail) = rest.split_at(page_bytes[class]);
                whole &= self.backend.load_page(class, page, head);
                rest = tail;
            }
        }
        if self.pages.is_recurrent() {
            whole &= self.backend.load_state(state, rest);
        }
        assert!(whole, "the lengths were checked");
        self.prefixes.keep(&mut self.pages, &parsed.tokens.into(), snapshot, Origin::Prompt);
        Ok(true)
    }
}

fn hash_of(bytes: &[u8]) -> blake3::Hash {
    blake3::hash(bytes)
}

/// Session files, the newest first.
fn session_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == EXTENSION) {
            let time = std::fs::metadata(&path).and_then(|m| m.modified()).ok();
            files.push((std::cmp::Reverse(time), path));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path)| path).collect())
}
