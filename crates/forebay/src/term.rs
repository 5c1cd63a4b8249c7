//! Progress bars and interruption.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Writes a line to standard output, as `println!` does; but a closed pipe is an error and no panic.
macro_rules! say {
    ($($arg:tt)*) => { $crate::term::say_line(format_args!($($arg)*)) };
}
pub(crate) use say;

/// Writes a line to standard error, as `eprintln!` does; but where nobody can read it, it is lost and no
/// panic.
macro_rules! note {
    ($($arg:tt)*) => { $crate::term::note_line(format_args!($($arg)*)) };
}
pub(crate) use note;

/// What [`note!`] does.
pub fn note_line(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// What [`say!`] does.
pub fn say_line(line: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Set by Ctrl-C, or when the system asks to end; a second time ends the process at once. Always the same one.
pub fn interruption() -> Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let install = || {
        let flag = Arc::new(AtomicBool::new(false));
        let seen = flag.clone();
        let result = ctrlc::set_handler(move || {
            if seen.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        });
        if let Err(e) = result {
            note!("note: Ctrl-C ends the program at once ({e})");
        }
        flag
    };
    FLAG.get_or_init(install).clone()
}

/// A bar on stderr that appears when there is a terminal and the work takes a while.
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// Counts bytes.
    pub fn bytes(what: &'static str) -> Bar {
        Bar::new(what, "{msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec}")
    }

    /// Counts steps.
    pub fn steps(what: &'static str) -> Bar {
        Bar::new(what, "{msg} {wide_bar} {percent}% {eta}")
    }

    fn new(what: &'static str, template: &str) -> Bar {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr_with_hz(10),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template(template).expect("the template is a constant");
        bar.set_style(style);
        bar.set_message(what);
        Bar { bar }
    }

    /// `done` of `total`. Nothing is drawn in the first third of a second.
    pub fn set(&self, done: u64, total: u64) {
        if self.bar.elapsed() > Duration::from_millis(300) {
            self.bar.set_length(total);
            self.bar.set_position(done);
        }
    }

    /// Removes the bar.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}

/// One bar per file that is on its way; without a terminal, a line per file that has arrived.
pub struct FileBars {
    all: MultiProgress,
    bars: Mutex<BTreeMap<String, ProgressBar>>,
    drawn: bool,
}

impl FileBars {
    /// No bar yet.
    pub fn new() -> FileBars {
        let drawn = std::io::stderr().is_terminal();
        let target = match drawn {
            true => ProgressDrawTarget::stderr_with_hz(10),
            false => ProgressDrawTarget::hidden(),
        };
        let all = MultiProgress::with_draw_target(target);
        FileBars { all, bars: Mutex::default(), drawn }
    }

    /// `done` of `total` bytes of a file are there.
    pub fn set(&self, name: &str, done: u64, total: u64) {
        let mut bars = self.bars.lock().expect("no holder of the lock panics");
        if done == total {
            if let Some(bar) = bars.remove(name) {
                bar.finish_and_clear();
                if !self.drawn {
                    note!("{name}: {total} bytes");
                }
            }
            return;
        }
        let bar = bars.entry(name.to_owned()).or_insert_with(|| {
            let template =
                "{msg:40!} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
            let style = ProgressStyle::with_template(template);
            let bar = self.all.add(ProgressBar::new(total));
            bar.set_style(style.expect("the template is a constant"));
            bar.set_message(name.to_owned());
            bar.set_position(done);
            bar.reset_eta();
            bar
        });
        bar.set_position(done);
    }
}

impl Drop for FileBars {
    fn drop(&mut self) {
        let _ = self.all.clear();
    }
}
