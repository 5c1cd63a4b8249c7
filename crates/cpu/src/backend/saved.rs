//! Bytes of pages and states, for session files.

use super::CpuBackend;

impl CpuBackend {
    pub(super) fn page_to(&self, class: usize, page: u32, out: &mut Vec<u8>) {
        for (layer, kv) in self.program.kv_layers.iter().zip(&self.kv) {
            if layer.class == class {
                let bytes = kv.layout.page_bytes();
                out.extend_from_slice(&kv.pages[page as usize * bytes..][..bytes]);
            }
        }
    }

    pub(super) fn page_from(&mut self, class: usize, page: u32, mut bytes: &[u8]) -> bool {
        for (layer, kv) in self.program.kv_layers.iter().zip(&mut self.kv) {
            if layer.class == class {
                let n = kv.layout.page_bytes();
                let Some((head, rest)) = bytes.split_at_checked(n) else { return false };
                kv.pages[page as usize * n..][..n].copy_from_slice(head);
                bytes = rest;
            }
        }
        bytes.is_empty()
    }

    pub(super) fn state_to(&self, slot: u32, out: &mut Vec<u8>) {
        for states in &self.states {
            out.extend(states.slot(slot).iter().flat_map(|x| x.to_le_bytes()));
        }
    }

    pub(super) fn state_from(&mut self, slot: u32, mut bytes: &[u8]) -> bool {
        for states in &mut self.states {
            let floats = states.slot_mut(slot);
            let Some((head, rest)) = bytes.split_at_checked(floats.len() * 4) else { return false };
            for (x, le) in floats.iter_mut().zip(head.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*le);
            }
            bytes = rest;
        }
        bytes.is_empty()
    }
}
