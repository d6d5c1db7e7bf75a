//! A session: the device, the options and the output of a command.
//!
//! Standard output has only results: tables, or with `--json` one object per line. Messages,
//! warnings and progress go to standard error; progress only to a terminal.

use std::fmt::Display;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use aquifer::device::DeviceSpec;
use aquifer::device::sim::{Preset, SimConfig, SimDriver};
use aquifer::{Allocator, Device};
use aquifer_sim::CAPACITY_BYTES_MAX;
use aquifer_trace::Lagged;
use crossbeam::channel::Sender;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::cli::{ConfigArg, DeviceArg, Global};
use crate::exit::Failure;
use crate::warnings::Reported;

/// The device, the options and the output of a command.
#[derive(Debug)]
pub struct Session {
    device: DeviceArg,
    /// The options that the user gave.
    global: Global,
    /// The user's configs, or else the default one.
    configs: Vec<ConfigArg>,
    /// Shared with the sessions that are made from this one.
    reported: Arc<Reported>,
    /// Where messages go instead of standard error. Locked while a row or message is written, so
    /// that lines never mix.
    output: Mutex<Option<Sender<Output>>>,
}

/// Output of a command for a view of its progress.
#[derive(Debug)]
pub(crate) enum Output {
    /// A line, which scrolls away above the view.
    Line(String),
    /// The start of a line, which the view shows until the next one.
    Partial(String),
    /// The work is done.
    End,
}

/// The default device if there is no GPU.
const SIMULATED: &str = "sim:80GiB";

/// The start of the allocator's warning of options without effect, which is shown with the user's
/// text.
const IGNORED_OPTIONS: &str = "options without effect";

impl Session {
    /// Chooses the device and reports the choice.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn new(global: &Global) -> Result<Session, Failure> {
        if let Some(device) = &global.device {
            return Session::of(global, device.clone()).announced("as asked for with --device");
        }
        let best = aquifer::open_best()?;
        let reason = best.chosen_because().unwrap_or_default();
        if best.info().is_virtual {
            return Session::of(global, SIMULATED.parse()?).announced(&brief(reason));
        }
        Session::of(global, format!("cuda:{}", best.info().ordinal).parse()?).announced(reason)
    }

    /// The same for a command that needs devices of several sizes: by default a simulated one, even
    /// if there is a GPU.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn resizable(global: &Global, command: &str) -> Result<Session, Failure> {
        let reason = format!("{command} simulates devices of several sizes");
        match &global.device {
            Some(device) if matches!(device.spec, DeviceSpec::Sim(_)) => {
                Session::of(global, device.clone()).announced(&format!("as asked for with --device; {reason}"))
            }
            Some(_) => Session::new(global),
            None => Session::of(global, SIMULATED.parse()?).announced(&reason),
        }
    }

    /// The same for a command that opens no device of its own: none is reported.
    ///
    /// # Errors
    /// None: the default device has a valid name.
    pub fn without_device(global: &Global) -> Result<Session, Failure> {
        let device = global.device.clone();
        Ok(Session::of(global, device.map_or_else(|| SIMULATED.parse(), Ok)?))
    }

    fn of(global: &Global, mut device: DeviceArg) -> Session {
        if let DeviceSpec::Sim(sim) = &mut device.spec
            && !device.text.contains("seed=")
        {
            sim.seed = global.seed;
        }
        let configs = if global.configs.is_empty() { vec![ConfigArg::default()] } else { global.configs.clone() };
        let (reported, output) = (Arc::default(), Mutex::default());
        Session { device, global: global.clone(), configs, reported, output }
    }

    fn announced(self, reason: &str) -> Result<Session, Failure> {
        let name = self.open()?.info().name.clone();
        self.message(format_args!("device {}: {name} ({reason})", self.device.text));
        Ok(self)
    }

    /// The same session for commands that measure: without checks of memory accesses, and with new
    /// addresses for each plain allocation, unless the user asked for them. Of equally large free
    /// blocks, PyTorch takes the one in the oldest segment, which then has the lowest address.
    #[must_use]
    pub fn for_measuring(mut self) -> Session {
        if let DeviceSpec::Sim(sim) = &mut self.device.spec {
            sim.checks &= self.device.text.contains("checks=");
            sim.reuse &= self.device.text.contains("reuse=");
        }
        self
    }

    /// The device as the user wrote it.
    pub fn device_text(&self) -> &str {
        &self.device.text
    }

    /// Whether the user named no device.
    pub fn is_default_device(&self) -> bool {
        self.global.device.is_none()
    }

    /// The configuration of the simulated device, unless the device is a real one.
    pub fn sim(&self) -> Option<&SimConfig> {
        match &self.device.spec {
            DeviceSpec::Sim(sim) => Some(sim),
            _ => None,
        }
    }

    /// Opens the device; a simulated one is new for each call.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(&self) -> Result<Device, Failure> {
        Ok(self.device.spec.open()?)
    }

    /// Opens the device; a simulated one with a changed configuration, and with its simulator.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open_with(
        &self,
        change: impl FnOnce(SimConfig) -> SimConfig,
    ) -> Result<(Device, Option<Arc<SimDriver>>), Failure> {
        let Some(sim) = self.sim() else { return Ok((self.open()?, None)) };
        let driver = SimDriver::new(change(sim.clone()));
        Ok((Device::new(driver.clone()), Some(driver)))
    }

    /// Opens the device, with its simulator if it is a simulated one.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open_with_simulator(&self) -> Result<(Device, Option<Arc<SimDriver>>), Failure> {
        self.open_with(|sim| sim)
    }

    /// Opens a simulated device that lags behind by `lag` events. `None` for a real device, which
    /// has only its own lag.
    ///
    /// # Errors
    /// When a real device is to lag.
    pub fn open_lagging(&self, lag: u64) -> Result<Option<Lagged>, Failure> {
        let Some(sim) = self.sim() else {
            let usage = format!("--lag needs a simulated device, not {}", self.device.text);
            return if lag == 0 { Ok(None) } else { Err(Failure::Usage(usage)) };
        };
        Ok(Some(Lagged::new(sim.clone(), lag)))
    }

    /// The same session on the default simulated device, as if the user named none.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn simulated(&self, command: &str) -> Result<Session, Failure> {
        Session::resizable(&Global { device: None, ..self.global.clone() }, command)
    }

    /// The same session on a simulated device without memory of other programs. `None` if there is
    /// no such memory now.
    pub fn without_other_programs(&self) -> Option<Session> {
        let mut device = self.device.clone();
        match &mut device.spec {
            DeviceSpec::Sim(sim) if sim.other_process_bytes > 0 => sim.other_process_bytes = 0,
            _ => return None,
        }
        Some(self.on(device))
    }

    /// The same session on a device of another capacity, if it is a simulated one.
    #[must_use]
    pub fn resized(&self, bytes: u64) -> Session {
        let mut device = self.device.clone();
        if let DeviceSpec::Sim(sim) = &mut device.spec {
            resize(sim, bytes);
        }
        self.on(device)
    }

    /// The same session on another device.
    fn on(&self, device: DeviceArg) -> Session {
        Session { reported: Arc::clone(&self.reported), ..Session::of(&self.global, device) }
    }

    /// The largest size for [`Session::sized`].
    ///
    /// # Errors
    /// When the device cannot be opened, and errors of the driver.
    pub fn most_bytes(&self) -> Result<u64, Failure> {
        match self.sim() {
            Some(_) => Ok(CAPACITY_BYTES_MAX),
            None => Ok(self.open()?.memory_info()?.free),
        }
    }

    /// A device of this size, with the options for it: a simulated one, or the real one with a
    /// limit in the options.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn sized(&self, bytes: u64, config: &ConfigArg) -> Result<(Device, ConfigArg), Failure> {
        let mut config = config.clone();
        if self.sim().is_none() {
            config.config.limit = Some(config.config.limit.map_or(bytes, |limit| limit.min(bytes)));
        }
        Ok((self.open_with_capacity(bytes)?, config))
    }

    /// Opens the device, a simulated one with another capacity.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open_with_capacity(&self, bytes: u64) -> Result<Device, Failure> {
        let resized = |mut sim: SimConfig| {
            resize(&mut sim, bytes);
            sim
        };
        Ok(self.open_with(resized)?.0)
    }

    /// The options, in the order given; at least one.
    pub fn configs(&self) -> &[ConfigArg] {
        &self.configs
    }

    /// The user's options, or else `usual`; those that are the same once.
    pub fn configs_or(&self, usual: &[&str]) -> Vec<ConfigArg> {
        distinct(if self.global.configs.is_empty() { parsed(usual) } else { self.configs.clone() })
    }

    /// `usual`, and the user's options if they differ from those.
    pub fn configs_with(&self, usual: &[&str]) -> Vec<ConfigArg> {
        distinct([parsed(usual), self.configs.clone()].concat())
    }

    /// The options, for a command that takes only one.
    ///
    /// # Errors
    /// When several were given.
    pub fn config(&self) -> Result<&ConfigArg, Failure> {
        match &self.configs[..] {
            [config] => Ok(config),
            several => Err(Failure::Usage(format!("this command takes one --config, not {}", several.len()))),
        }
    }

    /// An allocator. Its warnings, such as a device that cannot map memory or options without
    /// effect, are reported once a session, and not for trials.
    ///
    /// # Errors
    /// Those of the allocator.
    pub fn allocator(&self, device: &Device, config: &ConfigArg) -> Result<Allocator, Failure> {
        config.refuse_pytorch()?;
        let mut options = config.config.clone();
        // What is measured is what a GPU does.
        options.quarantine.get_or_insert(0);
        let make = || Allocator::new(device, options.clone());
        if config.is_trial {
            return Ok(Reported::default().once(make, |_| {})?);
        }
        let report = |line: &str| {
            let whose = if line.starts_with(IGNORED_OPTIONS) { &*format!("--config '{}': ", config.text) } else { "" };
            self.message(format_args!("warning: {whose}{line}"));
        };
        Ok(self.reported.once(make, report)?)
    }

    /// The seed of generated workloads.
    pub fn seed(&self) -> u64 {
        self.global.seed
    }

    /// Whether results are JSON rows.
    pub fn json(&self) -> bool {
        self.global.json
    }

    /// Writes a row of results if they are to be JSON.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn row(&self, row: &impl Serialize) -> Result<(), Failure> {
        if !self.global.json {
            return Ok(());
        }
        let mut line = serde_json::to_vec(row).map_err(|error| Failure::Output(error.into()))?;
        line.push(b'\n');
        self.write(&line)
    }

    /// Writes results as text, followed by a line end, unless they are to be JSON.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn show(&self, text: impl Display) -> Result<(), Failure> {
        if self.global.json { Ok(()) } else { self.write(format!("{text}\n").as_bytes()) }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        let _lines_do_not_mix = self.output.lock();
        let mut out = std::io::stdout().lock();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            // Output that was closed early does not change the exit code.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            written => Ok(written?),
        }
    }

    /// Writes a message to standard error, or where messages were diverted to.
    pub fn message(&self, text: impl Display) {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let diverted = output.as_ref().is_some_and(|view| view.send(Output::Line(text.to_string())).is_ok());
        if !diverted {
            // If standard error is closed, there is no other place for messages.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }

    /// Diverts messages to a view, or no longer.
    pub(crate) fn divert(&self, view: Option<Sender<Output>>) {
        *self.output.lock().unwrap_or_else(PoisonError::into_inner) = view;
    }

    /// A progress bar on standard error, invisible if that is not a terminal.
    pub fn progress(&self, steps: u64, what: &str) -> ProgressBar {
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len}, {eta} left {msg}");
        let bar = ProgressBar::new(steps).with_prefix(what.to_owned());
        if let Ok(style) = style { bar.with_style(style) } else { bar }
    }
}

/// Why there is no GPU, without details that the error of `--device cuda` has.
fn brief(reason: &str) -> String {
    match reason.match_indices(": ").nth(1) {
        Some((end, _)) => format!("{}; --device cuda says more", &reason[..end]),
        None => reason.to_owned(),
    }
}

/// Option strings of this program, which are valid.
fn parsed(texts: &[&str]) -> Vec<ConfigArg> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// The options without those that are the same as earlier ones.
fn distinct(configs: Vec<ConfigArg>) -> Vec<ConfigArg> {
    let mut all: Vec<ConfigArg> = Vec::new();
    for config in configs {
        if all.iter().all(|known| !known.is_same(&config)) {
            all.push(config);
        }
    }
    all
}

/// Gives a simulated device another capacity. Its memory is its own then, as a process that runs out
/// of memory shared with the host ends.
fn resize(sim: &mut SimConfig, bytes: u64) {
    sim.capacity_bytes = bytes;
    if matches!(sim.preset, Preset::Gb10 | Preset::Orin) {
        (sim.preset, sim.addresses) = (Preset::H100, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_behind_what_is_wrong() {
        let long = "no real GPU can be used: no CUDA driver was found: libcuda.so.1: no such file; use sim";
        assert_eq!(brief(long), "no real GPU can be used: no CUDA driver was found; --device cuda says more");
        let short = "no real GPU can be used: CUDA_VISIBLE_DEVICES=\"\" hides every GPU; change or unset it";
        assert_eq!(brief(short), short);
    }
}
