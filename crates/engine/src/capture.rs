//! Capture: rows at taps, written to a safetensors file while a model runs.
//!
//! A pass goes through the points of all layers, a file wants each point by itself, and nobody knows how many rows will come.
//! So rows are streamed to a spool file as they come, and when all are there the spool is put in order into the file that was
//! asked for, block by block. What is kept in memory does not grow with the model: a buffer, and 4 bytes for each pass.
//!
//! The file, all little endian: `rows` `[R]` and `tokens` `[R]` (I32: position in the sequence, and the token there), and for each point
//! `NAME` `[L, R, width]` with `NAME.layers` `[L]` (I32). `attention` and `feed_forward` are the residual stream (F32, width d), `router` is
//! F32 and as wide as there are experts, `choice` is I32 (experts in rank order, width top_k) with `choice.weights` (F32). Streams are seen
//! after steering. A pass that fails leaves nothing.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use forebay_program::{Op, Point, Program, Routing, Tap, TapSet};
use serde_json::{Map, Value, json};

use crate::error::EngineError;

/// What the buffers take, for the ledger.
pub(crate) const CAPTURE_BYTES: u64 = 2 * BUFFER_BYTES as u64 + (64 << 10);
const BUFFER_BYTES: usize = 256 << 10;

/// A point to capture.
#[derive(Clone, Debug, PartialEq)]
pub struct CapturePoint {
    /// Which.
    pub point: Point,
    /// First and last layer; none: all that have it.
    pub layers: Option<(usize, usize)>,
}

/// Which rows are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureRows {
    /// Those whose logits are wanted: the last of the prompt, and each generated token that is run.
    Last,
    /// All.
    All,
}

/// What was captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Captured {
    /// Rows.
    pub rows: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

/// The places that points mean in a model of so many layers, `routed` ones of which have routed experts.
pub(crate) fn taps(
    points: &[CapturePoint],
    layers: usize,
    routed: &dyn Fn(usize) -> bool,
) -> Result<TapSet, EngineError> {
    let mut taps = TapSet::default();
    for CapturePoint { point, layers: asked } in points {
        let (first, last) = asked.unwrap_or((0, layers.saturating_sub(1)));
        if first > last || last >= layers {
            return Err(EngineError::Refused {
                what: format!("capturing {point} of layers {first} to {last}"),
                instead: format!("this model has layers 0 to {}", layers.saturating_sub(1)),
            });
        }
        let has = |layer: &usize| point.is_stream() || routed(*layer);
        let places: Vec<usize> = (first..=last).filter(has).collect();
        if places.is_empty() {
            return Err(EngineError::Refused {
                what: format!("capturing {point} of layers {first} to {last}"),
                instead: "these layers have no routed experts; capture attention or feed-forward"
                    .into(),
            });
        }
        taps.extend(places.into_iter().map(|layer| (layer, *point)));
    }
    Ok(taps)
}

/// Type of a tensor's elements; all take 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    F32,
    I32,
}

/// What a pass writes for its rows at one place.
#[derive(Clone, Debug)]
struct Place {
    /// Tensor in the file.
    tensor: &'static str,
    layer: Option<usize>,
    /// Elements of a row.
    width: usize,
    kind: Kind,
}

/// A capture that goes on.
pub(crate) struct Capture {
    out: PathBuf,
    spool_path: PathBuf,
    spool: BufWriter<File>,
    rows: CaptureRows,
    wanted: TapSet,
    /// In the order in which a pass comes by.
    places: Vec<Place>,
    /// Rows of each pass that is whole.
    passes: Vec<u32>,
    /// Bytes of the spool that are of whole passes.
    whole_bytes: u64,
    /// Rows of the batch that the running pass captures.
    current: Vec<u32>,
    /// Place that is written next.
    next: usize,
}

impl Capture {
    /// Begins a capture into `out`.
    pub(crate) fn begin(
        out: &Path,
        rows: CaptureRows,
        wanted: TapSet,
        program: &Program,
    ) -> Result<Capture, EngineError> {
        let places = places(&wanted, program)?;
        // Said before anything is computed: what was captured could not be put there.
        if out.is_dir() || out.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(fault(out, std::io::ErrorKind::IsADirectory.into()));
        }
        let mut name = out.file_name().unwrap_or_default().to_owned();
        name.push(".spool");
        let spool_path = out.with_file_name(name);
        let spool =
            File::options().read(true).write(true).create(true).truncate(true).open(&spool_path);
        let spool = spool.map_err(|error| fault(&spool_path, error))?;
        Ok(Capture {
            out: out.to_owned(),
            spool_path,
            spool: BufWriter::with_capacity(BUFFER_BYTES, spool),
            rows,
            wanted,
            places,
            passes: Vec::new(),
            whole_bytes: 0,
            current: Vec::new(),
            next: 0,
        })
    }

    /// A pass begins: its rows' positions and tokens, and which rows want logits.
    pub(crate) fn pass(
        &mut self,
        positions: &[u32],
        tokens: &[u32],
        logit_rows: &[u32],
    ) -> Result<(), EngineError> {
        if self.next != 0 {
            // The pass before failed.
            let seek = self.spool.seek(SeekFrom::Start(self.whole_bytes));
            seek.map_err(|error| fault(&self.spool_path, error))?;
            self.next = 0;
        }
        self.current.clear();
        match self.rows {
            CaptureRows::All => self.current.extend(0..positions.len() as u32),
            CaptureRows::Last => self.current.extend_from_slice(logit_rows),
        }
        for numbers in [positions, tokens] {
            let rows: Vec<u32> = self.current.iter().map(|&row| numbers[row as usize]).collect();
            self.write(rows.into_iter().map(u32::to_le_bytes))?;
        }
        Ok(())
    }

    /// The rows at a tap, `[rows, width]`.
    pub(crate) fn tapped(
        &mut self,
        tap: &Tap,
        values: &[f32],
        width: usize,
    ) -> Result<(), EngineError> {
        if !self.wanted.contains(tap.layer, tap.point) {
            return Ok(());
        }
        let rows = std::mem::take(&mut self.current);
        let floats = rows.iter().flat_map(|&row| &values[row as usize * width..][..width]);
        let written = self.write(floats.map(|v| v.to_le_bytes()));
        self.current = rows;
        written
    }

    /// The choice of a routed layer.
    pub(crate) fn chosen(
        &mut self,
        layer: usize,
        top_k: usize,
        routing: &Routing,
    ) -> Result<(), EngineError> {
        if !self.wanted.contains(layer, Point::Choice) {
            return Ok(());
        }
        let rows = std::mem::take(&mut self.current);
        let part = |row: &u32| *row as usize * top_k..(*row as usize + 1) * top_k;
        let ids = rows.iter().flat_map(|row| &routing.ids[part(row)]);
        let ids = self.write(ids.map(|id| i32::from(*id).to_le_bytes()));
        let weights = rows.iter().flat_map(|row| &routing.weights[part(row)]);
        let weights = ids.and_then(|()| self.write(weights.map(|w| w.to_le_bytes())));
        self.current = rows;
        weights
    }

    /// The pass went well.
    pub(crate) fn passed(&mut self) {
        assert_eq!(self.next, self.places.len(), "a pass comes by all places");
        let rows = self.current.len() as u64;
        self.whole_bytes += rows * self.row_bytes();
        if rows > 0 {
            self.passes.push(rows as u32);
        }
        self.next = 0;
    }

    fn row_bytes(&self) -> u64 {
        self.places.iter().map(|place| place.width as u64 * 4).sum()
    }

    /// Writes what the next place gets.
    fn write(&mut self, elements: impl Iterator<Item = [u8; 4]>) -> Result<(), EngineError> {
        for element in elements {
            self.spool.write_all(&element).map_err(|error| fault(&self.spool_path, error))?;
        }
        self.next += 1;
        Ok(())
    }

    /// Puts the spool in order into the file that was asked for.
    pub(crate) fn finish(mut self) -> Result<Captured, EngineError> {
        self.spool.flush().map_err(|error| fault(&self.spool_path, error))?;
        let rows: u64 = self.passes.iter().map(|&n| u64::from(n)).sum();
        let tensors = self.tensors();
        let header = self.header(&tensors, rows);
        let partial = self.spool_path.with_extension("partial");
        let written = self.arrange(&partial, &header, &tensors);
        let written =
            written.and_then(|bytes| std::fs::rename(&partial, &self.out).map(|()| bytes));
        match written {
            Ok(bytes) => Ok(Captured { rows, bytes }),
            Err(error) => {
                // What is left of it is of no use; a failure to remove it changes nothing.
                let _ = std::fs::remove_file(&partial);
                Err(fault(&self.out, error))
            }
        }
    }

    /// Places by tensor, in the order of the file; of one tensor by layer.
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>)> {
        let mut tensors: Vec<(&'static str, Vec<usize>)> = Vec::new();
        for (index, place) in self.places.iter().enumerate() {
            match tensors.iter_mut().find(|(name, _)| *name == place.tensor) {
                Some((_, places)) => places.push(index),
                None => tensors.push((place.tensor, vec![index])),
            }
        }
        tensors
    }

    fn arrange(
        &mut self,
        partial: &Path,
        header: &Header,
        tensors: &[(&'static str, Vec<usize>)],
    ) -> std::io::Result<u64> {
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, File::create(partial)?);
        out.write_all(&(header.text.len() as u64).to_le_bytes())?;
        out.write_all(header.text.as_bytes())?;
        for (_, layers) in &header.layers {
            for layer in layers {
                out.write_all(&(*layer as i32).to_le_bytes())?;
            }
        }
        // Bytes of a row before each place.
        let before: Vec<u64> = self
            .places
            .iter()
            .scan(0, |sum, place| {
                let start = *sum;
                *sum += place.width as u64 * 4;
                Some(start)
            })
            .collect();
        let row_bytes = self.row_bytes();
        let spool = self.spool.get_mut();
        for &place in tensors.iter().flat_map(|(_, places)| places) {
            let width = self.places[place].width as u64 * 4;
            let mut start = 0;
            for &rows in &self.passes {
                let rows = u64::from(rows);
                spool.seek(SeekFrom::Start(start + rows * before[place]))?;
                let copied = std::io::copy(&mut (&*spool).take(rows * width), &mut out)?;
                if copied != rows * width {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                start += rows * row_bytes;
            }
        }
        let file = out.into_inner().map_err(|error| error.into_error())?;
        file.sync_all()?;
        Ok(file.metadata()?.len())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // A file that cannot be removed is not worth an error.
        let _ = std::fs::remove_file(&self.spool_path);
    }
}

/// The header of the file, and the tensors of layers that follow it.
struct Header {
    /// JSON, filled up to a multiple of 8.
    text: String,
    layers: Vec<(String, Vec<usize>)>,
}

impl Capture {
    fn shape(&self, places: &[usize], rows: u64) -> Vec<u64> {
        let place = &self.places[places[0]];
        match place.layer {
            Some(_) => vec![places.len() as u64, rows, place.width as u64],
            None => vec![rows],
        }
    }

    fn header(&self, tensors: &[(&'static str, Vec<usize>)], rows: u64) -> Header {
        let mut entries = Map::new();
        let mut at = 0;
        let mut add = |name: String, kind: Kind, shape: Vec<u64>| {
            let bytes = shape.iter().product::<u64>() * 4;
            let dtype = if kind == Kind::F32 { "F32" } else { "I32" };
            let offsets = [at, at + bytes];
            entries
                .insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
            at += bytes;
        };
        let mut layers = Vec::new();
        for (name, places) in tensors {
            let of: Vec<usize> = places.iter().filter_map(|&p| self.places[p].layer).collect();
            // The weights of choices are of the same layers as the choices.
            if !of.is_empty() && !name.contains('.') {
                let name = format!("{name}.layers");
                add(name.clone(), Kind::I32, vec![of.len() as u64]);
                layers.push((name, of));
            }
        }
        for (name, places) in tensors {
            add((*name).to_owned(), self.places[places[0]].kind, self.shape(places, rows));
        }
        let rows = if self.rows == CaptureRows::All { "all" } else { "last" };
        let about = json!({ "format": "pt", "producer": "forebay", "rows": rows });
        entries.insert("__metadata__".into(), about);
        let mut text = Value::Object(entries).to_string();
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        Header { text, layers }
    }
}

/// All places of a pass, in order; the layers of a point must be alike.
fn places(wanted: &TapSet, program: &Program) -> Result<Vec<Place>, EngineError> {
    let number = |tensor| Place { tensor, layer: None, width: 1, kind: Kind::I32 };
    let mut places = vec![number("rows"), number("tokens")];
    let mut add = |tensor, layer, width, kind| -> Result<(), EngineError> {
        let same = places.iter().find(|p: &&Place| p.tensor == tensor);
        if let Some(other) = same.filter(|p| p.width != width) {
            return Err(EngineError::Refused {
                what: format!(
                    "capturing {tensor} of layers {:?} and {layer} together",
                    other.layer
                ),
                instead: format!(
                    "they are {} and {width} wide; capture them one by one, as {tensor}@{layer}",
                    other.width
                ),
            });
        }
        places.push(Place { tensor, layer: Some(layer), width, kind });
        Ok(())
    };
    for segment in &program.segments {
        for op in &segment.ops {
            let Op::Tap(tap) = op else { continue };
            if wanted.contains(tap.layer, tap.point) {
                let tensor = match tap.point {
                    Point::Attention => "attention",
                    Point::FeedForward => "feed_forward",
                    _ => "router",
                };
                add(tensor, tap.layer, program.buffers[tap.buf.0].width, Kind::F32)?;
            }
        }
        let moe = segment.moe.map(|id| &program.moes[id.0]);
        if let Some(moe) = moe.filter(|moe| wanted.contains(moe.layer, Point::Choice)) {
            add("choice", moe.layer, moe.top_k, Kind::I32)?;
            add("choice.weights", moe.layer, moe.top_k, Kind::F32)?;
        }
    }
    Ok(places)
}

fn fault(path: &Path, error: std::io::Error) -> EngineError {
    EngineError::Capture { path: path.to_owned(), error }
}
