//! The memory ledger: every byte that a process will own, known before weights are loaded.

use std::fmt;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerItem {
    /// What for, as shown to users.
    pub what: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// All lines.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Ledger {
    /// In the order shown.
    pub items: Vec<LedgerItem>,
}

impl Ledger {
    /// Adds a line; a feature that is off adds none.
    pub fn add(&mut self, what: &'static str, bytes: u64) {
        if bytes > 0 {
            self.items.push(LedgerItem { what, bytes });
        }
    }

    /// Sum of all lines.
    pub fn total(&self) -> u64 {
        self.items.iter().map(|i| i.bytes).sum()
    }

    /// Bytes of one line, 0 when it is not there.
    pub fn get(&self, what: &str) -> u64 {
        self.items.iter().filter(|i| i.what == what).map(|i| i.bytes).sum()
    }
}

/// `1.24 GiB`, `37.0 MiB`, `512 B`.
pub fn human(bytes: u64) -> String {
    let b = bytes as f64;
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", b / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", b / 1_048_576.0),
        _ => format!("{:.2} GiB", b / 1_073_741_824.0),
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for item in &self.items {
            writeln!(f, "  {:<32} {:>12}", item.what, human(item.bytes))?;
        }
        write!(f, "  {:<32} {:>12}", "total", human(self.total()))
    }
}
