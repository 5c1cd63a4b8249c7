//! Steering: the residual stream is moved along given directions at taps.
//!
//! Vectors are read when a model is opened ([`SteerVectors`]); which of them act, and how strongly, is chosen for every
//! sequence ([`Steering`]) and is part of what a kept beginning is: its key goes with snapshots and session files, so steered and
//! unsteered states never mix. Several edits at one point are made in the order in which the vectors were given, whatever the
//! order in which a request names them, so that one choice has one meaning.
//!
//! Files: `file`. The arithmetic: `forebay_cpu::steer`. Where the taps are: `forebay_program::tap`.

pub(crate) mod file;

use std::collections::{BTreeMap, HashMap};
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::sync::Arc;

use forebay_cpu::Level;
use forebay_cpu::rows::RowsMut;
use forebay_cpu::steer::{Edit, edit};
use forebay_files::FilesError;
use forebay_program::{Point, Tap, TapSet};

use file::Shape;

/// What a vector does to a row `x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Adds strength times the direction, as it is in the file.
    Add,
    /// Takes the component along the direction away; the strength is the part that goes.
    Ablate,
    /// Holds the projection on the direction, made length 1, within a range.
    Clamp {
        /// Least projection.
        min: f32,
        /// Largest projection.
        max: f32,
    },
    /// As add, and then the row gets the length back that it had.
    Renormalise,
}

/// A vector to be read.
#[derive(Clone, Debug, PartialEq)]
pub struct SteerSource {
    /// Name by which sequences choose it; none: it acts on all.
    pub name: Option<String>,
    /// The file.
    pub path: PathBuf,
    /// Where it acts: a point at which the residual stream is.
    pub point: Point,
    /// What it does.
    pub mode: Mode,
    /// How strongly, where who chooses it says nothing.
    pub strength: f32,
    /// Layers, of those in the file; none: all of these.
    pub layers: Option<RangeInclusive<usize>>,
}

impl SteerSource {
    /// A file with llama.cpp's meaning: added when a layer is done.
    pub fn new(path: impl Into<PathBuf>) -> SteerSource {
        SteerSource {
            name: None,
            path: path.into(),
            point: Point::FeedForward,
            mode: Mode::Add,
            strength: 1.0,
            layers: None,
        }
    }
}

/// What is wrong with a vector, or with a choice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SteerError {
    /// The file cannot be read.
    #[error("{}: {error}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is damaged.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// No tensor is a direction for a layer that was asked for.
    #[error(
        "{}: holds no direction{}: tensors are named direction.N, in safetensors also layers.N, direction or directions",
        file.display(),
        layers.map_or(String::new(), |(a, b)| format!(" for layers {a} to {b}"))
    )]
    Empty {
        /// The file.
        file: PathBuf,
        /// First and last layer asked for.
        layers: Option<(usize, usize)>,
    },
    /// A direction for another model.
    #[error("{}: {tensor} has shape {found:?}, and the model needs {expected:?}", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What fits.
        expected: Vec<u64>,
        /// What is there.
        found: Vec<u64>,
    },
    /// A layer that the model does not have.
    #[error("{}: {tensor}: directions for this model are numbered {expected}", file.display())]
    Layer {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Numbers that exist.
        expected: String,
    },
    /// Layers that are asked for and that the model does not have.
    #[error("{}: layers {first} to {last} are asked for, and this model has layers 0 to {}", file.display(), layers.saturating_sub(1))]
    Range {
        /// The file.
        file: PathBuf,
        /// First layer asked for.
        first: usize,
        /// Last layer asked for.
        last: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Two directions for one layer.
    #[error("{}: two tensors are directions for layer {layer}", file.display())]
    Twice {
        /// The file.
        file: PathBuf,
        /// The layer.
        layer: usize,
    },
    /// Numbers that are no direction.
    #[error("{}: {tensor} must hold {expected}, and holds {found}", file.display())]
    Values {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What would do.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A point without a residual stream.
    #[error("{}: nothing can be steered at {point}: choose attention or feed-forward", file.display())]
    Point {
        /// The file.
        file: PathBuf,
        /// The point.
        point: Point,
    },
    /// A name that is not given.
    #[error("no steering vector is named {name:?}; there {}", match known.len() {
        0 => "are none".to_string(),
        _ => format!("are {}", known.join(", ")),
    })]
    Unknown {
        /// The name.
        name: String,
        /// Names that are.
        known: Vec<String>,
    },
    /// A name that is given twice.
    #[error("two steering vectors are named {name:?}")]
    Name {
        /// The name.
        name: String,
    },
    /// A strength or range that is no number.
    #[error("the strength of steering vector {name:?} must be a finite number, and is {found}")]
    Strength {
        /// The vector.
        name: String,
        /// What is given.
        found: f32,
    },
}

/// A vector that is read.
#[derive(Debug)]
struct Vector {
    name: Option<String>,
    /// Name or file, for messages.
    shown: String,
    point: Point,
    mode: Mode,
    strength: f32,
    /// By layer `[d]`: as in the file, or of length 1, as the mode needs it.
    directions: BTreeMap<usize, Vec<f32>>,
    /// Over all that decides what it does, the strength apart.
    hash: [u8; 32],
}

/// All vectors of an engine.
#[derive(Debug, Default)]
pub struct SteerVectors {
    vectors: Vec<Vector>,
    /// Which act at a place, in order.
    places: HashMap<(usize, Point), Vec<usize>>,
}

/// Which vectors act on a sequence, and how strongly. Made by [`SteerVectors::choose`].
#[derive(Debug, PartialEq)]
pub struct Steering {
    /// For each vector; 0: it does not act.
    strengths: Vec<f32>,
    key: SteerKey,
}

/// What a steering does, as a hash: equal keys, equal bits.
pub type SteerKey = [u8; 32];

impl Steering {
    /// The key.
    pub fn key(&self) -> SteerKey {
        self.key
    }
}

impl SteerVectors {
    /// Reads the files, in order.
    pub(crate) fn read(sources: &[SteerSource], shape: Shape) -> Result<SteerVectors, SteerError> {
        let mut all = SteerVectors::default();
        for source in sources {
            let vector = Vector::read(source, shape)?;
            if let Some(name) = source.name.as_ref().filter(|name| all.names().any(|n| n == *name))
            {
                return Err(SteerError::Name { name: name.clone() });
            }
            for &layer in vector.directions.keys() {
                all.places.entry((layer, vector.point)).or_default().push(all.vectors.len());
            }
            all.vectors.push(vector);
        }
        Ok(all)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Names by which vectors can be chosen.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.vectors.iter().filter_map(|vector| vector.name.as_deref())
    }

    /// Bytes of all directions.
    pub fn bytes(&self) -> u64 {
        let floats = self.vectors.iter().flat_map(|v| v.directions.values()).map(Vec::len);
        floats.sum::<usize>() as u64 * 4
    }

    /// Where they act.
    pub(crate) fn taps(&self) -> TapSet {
        let mut taps = TapSet::default();
        taps.extend(self.places.keys().copied());
        taps
    }

    /// All vectors at their own strengths; none: nothing acts.
    pub fn all(&self) -> Option<Arc<Steering>> {
        self.steering(self.vectors.iter().map(|vector| vector.strength).collect())
    }

    /// The vectors without a name, and of those with one the chosen: (name, strength, or its own). None: nothing acts.
    pub fn choose<'a>(
        &self,
        chosen: impl IntoIterator<Item = (&'a str, Option<f32>)>,
    ) -> Result<Option<Arc<Steering>>, SteerError> {
        let unnamed = |v: &Vector| if v.name.is_none() { v.strength } else { 0.0 };
        let mut strengths: Vec<f32> = self.vectors.iter().map(unnamed).collect();
        for (name, strength) in chosen {
            let index = self.vectors.iter().position(|v| v.name.as_deref() == Some(name));
            let index = index.ok_or_else(|| SteerError::Unknown {
                name: name.to_owned(),
                known: self.names().map(str::to_owned).collect(),
            })?;
            let strength = strength.unwrap_or(self.vectors[index].strength);
            if !strength.is_finite() {
                return Err(SteerError::Strength { name: name.to_owned(), found: strength });
            }
            strengths[index] = strength;
        }
        Ok(self.steering(strengths))
    }

    fn steering(&self, strengths: Vec<f32>) -> Option<Arc<Steering>> {
        let mut hasher = blake3::Hasher::new();
        let mut acts = false;
        for (vector, strength) in self.vectors.iter().zip(&strengths).filter(|(_, s)| **s != 0.0) {
            hasher.update(&vector.hash).update(&strength.to_le_bytes());
            acts = true;
        }
        acts.then(|| Arc::new(Steering { strengths, key: *hasher.finalize().as_bytes() }))
    }

    /// Steers rows `[rows, d]` at a tap.
    pub(crate) fn apply(&self, level: Level, tap: &Tap, steering: &Steering, rows: &mut [f32]) {
        let Some(acting) = self.places.get(&(tap.layer, tap.point)) else { return };
        for &index in acting {
            let strength = steering.strengths[index];
            if strength == 0.0 {
                continue;
            }
            let vector = &self.vectors[index];
            let direction = &vector.directions[&tap.layer];
            let what = match vector.mode {
                Mode::Add => Edit::Add { direction, strength },
                Mode::Renormalise => Edit::Renormalise { direction, strength },
                Mode::Ablate => Edit::Ablate { unit: direction, strength },
                Mode::Clamp { min, max } => Edit::Clamp { unit: direction, min, max, strength },
            };
            edit(level, RowsMut::dense(rows, direction.len()), what);
        }
    }

    /// For messages: each vector with its strength, point and layers.
    pub fn describe(&self) -> Vec<String> {
        let line = |v: &Vector| {
            let layers: Vec<usize> = v.directions.keys().copied().collect();
            let (first, last) = (layers.first().unwrap_or(&0), layers.last().unwrap_or(&0));
            format!(
                "{} {} at {}, layers {first} to {last}, strength {}",
                v.shown,
                v.mode.name(),
                v.point,
                v.strength
            )
        };
        self.vectors.iter().map(line).collect()
    }
}

impl Mode {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Add => "add",
            Mode::Ablate => "ablate",
            Mode::Clamp { .. } => "clamp",
            Mode::Renormalise => "renormalise",
        }
    }
}

impl Vector {
    fn read(source: &SteerSource, shape: Shape) -> Result<Vector, SteerError> {
        let shown = source.name.clone().unwrap_or_else(|| source.path.display().to_string());
        if !source.point.is_stream() {
            return Err(SteerError::Point { file: source.path.clone(), point: source.point });
        }
        if !source.strength.is_finite() {
            return Err(SteerError::Strength { name: shown, found: source.strength });
        }
        if let Some((first, last)) = source.layers.as_ref().map(|r| (*r.start(), *r.end()))
            && last >= shape.layers
        {
            let (file, layers) = (source.path.clone(), shape.layers);
            return Err(SteerError::Range { file, first, last, layers });
        }
        let mut directions = file::read(&source.path, shape, source.layers.as_ref())?;
        if matches!(source.mode, Mode::Ablate | Mode::Clamp { .. }) {
            for (layer, direction) in &mut directions {
                let squares = direction.iter().map(|v| f64::from(*v) * f64::from(*v));
                let norm = squares.sum::<f64>().sqrt();
                if norm == 0.0 {
                    return Err(SteerError::Values {
                        file: source.path.clone(),
                        tensor: format!("the direction of layer {layer}"),
                        expected: "a direction",
                        found: "zeros".into(),
                    });
                }
                direction.iter_mut().for_each(|v| *v = (f64::from(*v) / norm) as f32);
            }
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(source.point.name().as_bytes()).update(source.mode.name().as_bytes());
        if let Mode::Clamp { min, max } = source.mode {
            hasher.update(&min.to_le_bytes()).update(&max.to_le_bytes());
        }
        for (layer, direction) in &directions {
            hasher.update(&(*layer as u64).to_le_bytes());
            direction.iter().for_each(|v| {
                hasher.update(&v.to_le_bytes());
            });
        }
        Ok(Vector {
            name: source.name.clone(),
            shown,
            point: source.point,
            mode: source.mode,
            strength: source.strength,
            directions,
            hash: *hasher.finalize().as_bytes(),
        })
    }
}

/// Rows of a pass that are steered: ranges of rows, which do not overlap, and how.
pub(crate) type SteeredRows = Vec<(Range<usize>, Arc<Steering>)>;
