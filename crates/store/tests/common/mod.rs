//! Synthetic checkpoints: random bytes in several files, and experts of every layout in them.

#![allow(dead_code)]

use std::io::Write;
use std::path::PathBuf;

use forebay_files::FileEntry;
use forebay_models::{ExpertWeights, Extent, PlaneRef, WeightRef};
use forebay_quant::{Format, MatrixView, ParamType};
use forebay_store::io::entry_of;
use forebay_store::platform::{Platform, System};
use forebay_store::ring::RingSize;
use forebay_store::{ExpertView, IoEngine, LayerExperts, StoreSpec};

/// Those that this machine has.
pub fn engines() -> Vec<IoEngine> {
    match System.ring(&[], RingSize { reads: 1, buffers: 0 }) {
        Ok(_) => vec![IoEngine::Threads, IoEngine::Uring],
        Err(error) => {
            println!("only threads are tested: {error}");
            vec![IoEngine::Threads]
        }
    }
}

pub struct Rng(pub u64);

impl Rng {
    /// Below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

pub struct Checkpoint {
    dir: tempfile::TempDir,
    pub entries: Vec<FileEntry>,
    /// What is in the files.
    pub bytes: Vec<Vec<u8>>,
    pub spec: StoreSpec,
}

/// `d` and `inter` of every expert.
const D: usize = 96;
const INTER: usize = 64;

impl Checkpoint {
    /// Layers take turns: separate tensors, gate and up rows that alternate, three planes, floats.
    pub fn new(seed: u64, layers: usize, experts: usize) -> Checkpoint {
        let mut rng = Rng(seed);
        let mut files = Files { ends: vec![rng.below(9000); 3] };
        let mlx = Format::MlxAffine { bits: 4, group: 32, params: ParamType::F16 };
        let formats = [Format::Mxfp4, Format::Mxfp4Split, mlx, Format::F32];
        let spec = StoreSpec {
            layers: (0..layers)
                .map(|i| {
                    let format = formats[i % formats.len()];
                    let alternate = format == Format::Mxfp4Split;
                    let experts = files.layer(&mut rng, i, experts, format, alternate);
                    LayerExperts { layer: 2 * i + 1, experts }
                })
                .collect(),
        };
        let dir = tempfile::tempdir().unwrap();
        let mut entries = Vec::new();
        let mut bytes = Vec::new();
        for (i, &end) in files.ends.iter().enumerate() {
            // 255 never occurs: it would be a NaN scale. The last byte of a file is an expert's.
            let data: Vec<u8> = (0..end).map(|_| rng.below(255) as u8).collect();
            let path = dir.path().join(format!("weights-{i}.bin"));
            std::fs::File::create(&path).unwrap().write_all(&data).unwrap();
            entries.push(entry_of(&path).unwrap());
            bytes.push(data);
        }
        Checkpoint { dir, entries, bytes, spec }
    }

    /// The same files in another directory.
    pub fn copy(&self) -> (tempfile::TempDir, Vec<FileEntry>) {
        let dir = tempfile::tempdir().unwrap();
        let copy = |entry: &FileEntry| {
            let path = dir.path().join(entry.path.file_name().unwrap());
            std::fs::copy(&entry.path, &path).unwrap();
            entry_of(&path).unwrap()
        };
        let entries = self.entries.iter().map(copy).collect();
        (dir, entries)
    }

    pub fn path(&self, file: usize) -> PathBuf {
        self.dir.path().join(format!("weights-{file}.bin"))
    }

    /// Overwrites one byte of a file, keeping the entry current.
    pub fn poke(&mut self, file: u32, offset: u64, byte: u8) {
        let file = file as usize;
        self.bytes[file][offset as usize] = byte;
        std::fs::write(self.path(file), &self.bytes[file]).unwrap();
        self.entries[file] = entry_of(&self.path(file)).unwrap();
    }

    pub fn expected(&self, extent: Extent) -> &[u8] {
        &self.bytes[extent.file as usize][extent.offset as usize..][..extent.len as usize]
    }

    /// Panics unless the view shows the expert's bytes.
    pub fn check_expert(&self, layer: usize, expert: u16, view: ExpertView<'_>) {
        let weights = &self.spec.layers[layer].experts[expert as usize];
        self.check_matrix(&weights.gate, view.gate);
        self.check_matrix(&weights.up, view.up);
        self.check_matrix(&weights.down, view.down);
    }

    fn check_matrix(&self, weight: &WeightRef, view: MatrixView<'_>) {
        assert_eq!((view.rows(), view.cols()), (weight.rows, weight.cols));
        for (i, plane) in weight.planes.iter().enumerate() {
            let data = self.expected(plane.extent);
            for row in 0..weight.rows {
                let found = view.row(i, row);
                let expected = &data[row * plane.stride as usize..][..found.len()];
                assert!(found == expected, "{} plane {i} row {row}", weight.name);
            }
        }
    }
}

/// Where the next tensor of each file starts.
struct Files {
    ends: Vec<u64>,
}

impl Files {
    /// Room for a tensor at an odd place of some file.
    fn place(&mut self, rng: &mut Rng, len: u64) -> (u32, u64) {
        let file = rng.below(self.ends.len() as u64);
        let end = &mut self.ends[file as usize];
        let gap = [0, 1, 77, 5000, 70_000];
        let offset = *end + gap[rng.below(gap.len() as u64) as usize];
        *end = offset + len;
        (file as u32, offset)
    }

    fn layer(
        &mut self,
        rng: &mut Rng,
        layer: usize,
        experts: usize,
        format: Format,
        alternate: bool,
    ) -> Vec<ExpertWeights> {
        let (gates, ups) = match alternate {
            true => self.alternating(rng, &format!("{layer}.gate_up"), experts, format),
            false => (
                self.matrices(rng, &format!("{layer}.gate"), experts, format, INTER, D),
                self.matrices(rng, &format!("{layer}.up"), experts, format, INTER, D),
            ),
        };
        let downs = self.matrices(rng, &format!("{layer}.down"), experts, format, D, INTER);
        let weights = gates.into_iter().zip(ups).zip(downs);
        weights.map(|((gate, up), down)| ExpertWeights { gate, up, down }).collect()
    }

    /// A tensor `[experts, rows, row bytes]` per plane.
    fn matrices(
        &mut self,
        rng: &mut Rng,
        name: &str,
        experts: usize,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Vec<WeightRef> {
        let planes: Vec<_> = format
            .planes()
            .iter()
            .map(|plane| {
                let row = plane.row_bytes(cols).unwrap() as u64;
                let len = row * rows as u64;
                (self.place(rng, len * experts as u64), row, len)
            })
            .collect();
        (0..experts as u64)
            .map(|expert| WeightRef {
                name: name.into(),
                format,
                rows,
                cols,
                planes: planes
                    .iter()
                    .map(|&((file, offset), stride, len)| PlaneRef {
                        extent: Extent { file, offset: offset + expert * len, len },
                        stride,
                    })
                    .collect(),
            })
            .collect()
    }

    /// Gate rows even, up rows odd.
    fn alternating(
        &mut self,
        rng: &mut Rng,
        name: &str,
        experts: usize,
        format: Format,
    ) -> (Vec<WeightRef>, Vec<WeightRef>) {
        let both = self.matrices(rng, name, experts, format, 2 * INTER, D);
        let half = |first: u64| {
            let mut half = both.clone();
            for weight in &mut half {
                weight.rows = INTER;
                for plane in &mut weight.planes {
                    let row = plane.stride;
                    plane.extent.offset += first * row;
                    plane.extent.len -= row;
                    plane.stride = 2 * row;
                }
            }
            half
        };
        (half(0), half(1))
    }
}
