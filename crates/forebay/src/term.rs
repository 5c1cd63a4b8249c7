//! Progress bars and interruption.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Writes a line to standard output, as `println!` does; but a closed pipe is an error and no panic.
macro_rules! say {
    ($($arg:tt)*) => { $crate::term::say_line(format_args!($($arg)*)) };
}
pub(crate) use say;

/// What [`say!`] does.
pub fn say_line(line: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Set by Ctrl-C; a second Ctrl-C ends the process at once.
pub fn interruption() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = flag.clone();
    let result = ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    if let Err(e) = result {
        eprintln!("note: Ctrl-C ends the program at once ({e})");
    }
    flag
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
