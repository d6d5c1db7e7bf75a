//! The libraries' warnings. Warnings that many allocators share are shown once.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::Level;

/// Sends the libraries' warnings to standard error, in colours only where that is a terminal and
/// `NO_COLOR` is not set.
pub fn on_stderr() {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let subscriber = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal() && !no_color)
        // Otherwise an error of writing to standard error is reported there, and panics.
        .log_internal_errors(false)
        .with_max_level(Level::WARN)
        .with_target(false)
        .without_time()
        .finish();
    // Fails if another program uses this library and has set its own subscriber.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Warnings that were reported before.
#[derive(Debug, Default)]
pub(crate) struct Reported(Mutex<BTreeSet<String>>);

impl Reported {
    /// Runs `work` and reports its warnings, one line each, that were not reported before.
    pub(crate) fn once<T>(&self, work: impl FnOnce() -> T, report: impl Fn(&str)) -> T {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .with_max_level(Level::WARN)
            .with_level(false)
            .with_target(false)
            .without_time()
            .finish();
        let done = tracing::subscriber::with_default(subscriber, work);
        for line in lines.text().lines().map(str::trim).filter(|line| !line.is_empty()) {
            let is_new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(line.to_owned());
            if is_new {
                report(line);
            }
        }
        done
    }
}

/// The output of a subscriber.
#[derive(Clone, Debug, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn each_warning_is_reported_once() {
        let (reported, heard) = (Reported::default(), RefCell::new(Vec::new()));
        for _ in 0..3 {
            let answer = reported.once(
                || {
                    tracing::warn!(error = %"no room", "memory comes in segments");
                    tracing::warn!("another");
                    tracing::info!("not said");
                    7
                },
                |line| heard.borrow_mut().push(line.to_owned()),
            );
            assert_eq!(answer, 7);
        }
        assert_eq!(*heard.borrow(), ["memory comes in segments error=no room", "another"]);
    }
}
