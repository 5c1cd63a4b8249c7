//! Experts that are always there: loaded whole, or mapped and paged by the system.
//!
//! Every expert of a pass is ready at once. For mapped ones "ready" means that touching them reads
//! them; what that can cost, and what a shrinking file does, is said in [`crate::map`].

use std::sync::Arc;

use forebay_models::Extent;

use crate::ExpertView;
use crate::error::StoreError;
use crate::io::FileSet;
use crate::map::FileMap;
use crate::platform::Access;
use crate::queue::IoOptions;
use crate::spec::{
    LayerExperts, StoreSpec, check_expert_scales, expert_extents, expert_layout, expert_view,
};
use crate::stats::StoreStats;
use crate::store::{ExpertStore, Lease, Residency};
use crate::stream::check_distinct;
use crate::trunk::TrunkImage;

pub(crate) struct PresentStore {
    spec: StoreSpec,
    source: Source,
    /// `[layers][experts]`
    scales_good: Vec<Vec<bool>>,
    pass: Option<Pass>,
    serial: u64,
    stats: StoreStats,
}

enum Source {
    Image(TrunkImage),
    Maps {
        files: Arc<FileSet>,
        maps: Vec<FileMap>,
        /// Files of each layer.
        files_of_layer: Vec<Vec<u32>>,
    },
}

struct Pass {
    layer: usize,
    /// Not yet handed out.
    ready: Vec<u16>,
}

impl PresentStore {
    pub(crate) fn load(
        spec: &StoreSpec,
        files: &Arc<FileSet>,
        io: &IoOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PresentStore, StoreError> {
        let mut reader = |extent| spec.reader_of(extent);
        let image = TrunkImage::load_for(files, &spec.extents(), io, &mut reader, progress)?;
        let mut store = PresentStore::new(spec, Source::Image(image));
        store.check_all_scales()?;
        Ok(store)
    }

    /// Every expert's scales, on several threads: it walks through all of the memory.
    fn check_all_scales(&mut self) -> Result<(), StoreError> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        let share = self.spec.layers.len().div_ceil(threads).max(1);
        let source = &self.source;
        std::thread::scope(|scope| {
            let checks: Vec<_> = self
                .spec
                .layers
                .chunks(share)
                .map(|layers| {
                    scope.spawn(move || layers.iter().try_for_each(|l| source.check_layer(l)))
                })
                .collect();
            checks.into_iter().try_for_each(|check| check.join().expect("checks do not panic"))
        })?;
        self.scales_good.iter_mut().for_each(|layer| layer.fill(true));
        Ok(())
    }

    pub(crate) fn map(spec: &StoreSpec, files: Arc<FileSet>) -> Result<PresentStore, StoreError> {
        let mut maps = Vec::with_capacity(files.len());
        for file in 0..files.len() as u32 {
            files.check_unchanged(file)?;
            let handle = files.handle(file, 0, Access::Buffered);
            let map = FileMap::new(handle.file()).map_err(|source| StoreError::Open {
                path: files.entry(file).path.clone(),
                source,
            })?;
            maps.push(map);
        }
        let files_of_layer = spec.layers.iter().map(|layer| {
            let mut files: Vec<u32> =
                layer.experts.iter().flat_map(|w| expert_extents(w).map(|e| e.file)).collect();
            files.sort_unstable();
            files.dedup();
            files
        });
        let files_of_layer = files_of_layer.collect();
        Ok(PresentStore::new(spec, Source::Maps { files, maps, files_of_layer }))
    }

    fn new(spec: &StoreSpec, source: Source) -> PresentStore {
        PresentStore {
            source,
            scales_good: spec.layers.iter().map(|l| vec![false; l.experts.len()]).collect(),
            pass: None,
            serial: 0,
            stats: StoreStats::new(spec.layers.len()),
            spec: spec.clone(),
        }
    }

    /// Once per expert: are its scales numbers?
    fn check_scales(&mut self, layer: usize, expert: u16) -> Result<(), StoreError> {
        if !self.scales_good[layer][expert as usize] {
            let experts = &self.spec.layers[layer];
            let weights = &experts.experts[expert as usize];
            check_expert_scales(
                weights,
                |extent| self.source.bytes(extent),
                experts.layer,
                expert,
            )?;
            self.scales_good[layer][expert as usize] = true;
        }
        Ok(())
    }
}

impl Source {
    fn check_layer(&self, layer: &LayerExperts) -> Result<(), StoreError> {
        layer.experts.iter().enumerate().try_for_each(|(expert, weights)| {
            check_expert_scales(weights, |extent| self.bytes(extent), layer.layer, expert as u16)
        })
    }

    fn bytes(&self, extent: Extent) -> &[u8] {
        match self {
            Source::Image(image) => image.bytes(extent),
            Source::Maps { maps, .. } => {
                &maps[extent.file as usize][extent.offset as usize..][..extent.len as usize]
            }
        }
    }
}

impl ExpertStore for PresentStore {
    fn begin(&mut self, layer: usize, experts: &[u16]) -> Result<(), StoreError> {
        assert!(self.pass.is_none(), "a pass ends before the next begins");
        let weights = &self.spec.layers[layer].experts;
        check_distinct(experts, weights.len());
        if let Source::Maps { files, maps, files_of_layer } = &self.source {
            files_of_layer[layer].iter().try_for_each(|&file| files.check_unchanged(file))?;
            for &expert in experts {
                for read in expert_layout(&weights[expert as usize]).reads(u64::MAX) {
                    let start = read.offset as usize;
                    maps[read.file as usize].will_need(start..start + read.need);
                }
            }
        }
        self.serial += 1;
        self.stats.count(layer, experts.len(), 0);
        self.pass = Some(Pass { layer, ready: experts.to_vec() });
        Ok(())
    }

    fn next_ready(&mut self, out: &mut Vec<Lease>) -> Result<(), StoreError> {
        let Some(pass) = &self.pass else { return Ok(()) };
        let layer = pass.layer;
        for i in 0..pass.ready.len() {
            let expert = self.pass.as_ref().expect("just seen").ready[i];
            self.check_scales(layer, expert)?;
        }
        let pass = self.pass.as_mut().expect("just seen");
        let serial = self.serial;
        let lease = |expert| Lease { expert, slot: expert as u32, pass: serial };
        out.extend(pass.ready.drain(..).map(lease));
        Ok(())
    }

    fn view(&self, lease: &Lease) -> ExpertView<'_> {
        let pass = self.pass.as_ref().filter(|_| lease.pass == self.serial);
        let pass = pass.expect("a lease ends with its pass");
        let weights = &self.spec.layers[pass.layer].experts[lease.expert as usize];
        expert_view(weights, |extent| self.source.bytes(extent))
    }

    fn release(&mut self, leases: &mut Vec<Lease>) {
        leases.clear();
    }

    fn end(&mut self) {
        self.pass = None;
    }

    fn spec(&self) -> &StoreSpec {
        &self.spec
    }

    fn stats(&self) -> StoreStats {
        self.stats.clone()
    }

    fn reset_stats(&mut self) {
        self.stats = StoreStats::new(self.spec.layers.len());
    }

    fn residency(&self) -> Residency {
        match self.source {
            Source::Image(_) => Residency::Resident,
            Source::Maps { .. } => Residency::Mapped,
        }
    }

    fn slots(&self) -> usize {
        self.spec.n_experts_total()
    }

    fn bytes_in_memory(&self) -> u64 {
        match &self.source {
            Source::Image(image) => image.memory_bytes(),
            Source::Maps { .. } => 0,
        }
    }
}
