//! A session: the device and options that every command works with, and where its output goes.
//!
//! Standard output carries results only: tables, or with `--json` one object per line. Messages,
//! warnings and progress go to standard error, progress only to a terminal.

use std::fmt::Display;
use std::io::Write;
use std::sync::{Arc, Mutex};

use aquifer::device::sim::{SimConfig, SimDriver};
use aquifer::device::{DeviceSpec, DriverKind};
use aquifer::{Allocator, Device};
use aquifer_device::available;
use aquifer_device::sim::{CAPACITY_BYTES_MAX, Lagging};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::cli::{ConfigArg, DeviceArg, Global};
use crate::exit::Failure;
use crate::warnings::Told;

/// What every command works with.
#[derive(Debug)]
pub struct Session {
    device: DeviceArg,
    device_given: bool,
    configs: Vec<ConfigArg>,
    configs_given: bool,
    seed: u64,
    json: bool,
    told: Told,
    /// Held while a progress bar is drawn over or a row is written, so that lines never mix.
    output: Mutex<()>,
}

/// The device where there is no GPU, or none is wanted.
const SIMULATED: &str = "sim:80GiB";

/// How the allocator's warning of options without effect begins, which is told with the text that
/// the user gave.
const IGNORED_OPTIONS: &str = "options without effect";

/// A simulated device that lags.
#[derive(Debug)]
#[non_exhaustive]
pub struct Lagged {
    /// The device.
    pub device: Device,
    /// What makes it lag.
    pub lag: Arc<Lagging>,
    /// The simulator below.
    pub driver: Arc<SimDriver>,
}

impl Session {
    /// Chooses the device and says so.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn new(global: &Global) -> Result<Session, Failure> {
        let (device, reason) = match &global.device {
            Some(device) => (device.clone(), None),
            None => {
                let best = Device::best()?;
                let simulated = best.info().kind == DriverKind::Simulated;
                let text = if simulated { SIMULATED.to_owned() } else { format!("cuda:{}", best.info().ordinal) };
                (text.parse()?, best.chosen_because().map(str::to_owned))
            }
        };
        Session::on(global, device, reason.as_deref())
    }

    /// The same for a command that needs devices of several sizes: unless the user names one, it is
    /// a simulated one, also where there is a GPU.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn resizable(global: &Global, command: &str) -> Result<Session, Failure> {
        match &global.device {
            Some(_) => Session::new(global),
            None => {
                let reason = format!("{command} needs devices of several sizes, so it uses simulated ones");
                Session::on(global, SIMULATED.parse()?, Some(&reason))
            }
        }
    }

    /// The same for a command that uses no device: none is opened, and none is told of.
    ///
    /// # Errors
    /// When the name of the usual device is not understood, which is not so.
    pub fn without_device(global: &Global) -> Result<Session, Failure> {
        Ok(Session::of(global, SIMULATED.parse()?))
    }

    fn on(global: &Global, device: DeviceArg, reason: Option<&str>) -> Result<Session, Failure> {
        let session = Session::of(global, device);
        session.announce(reason)?;
        Ok(session)
    }

    fn of(global: &Global, mut device: DeviceArg) -> Session {
        if let DeviceSpec::Sim(sim) = &mut device.spec
            && !device.text.contains("seed=")
        {
            sim.seed = global.seed;
        }
        let configs = if global.configs.is_empty() { vec![ConfigArg::default()] } else { global.configs.clone() };
        Session {
            device,
            device_given: global.device.is_some(),
            configs,
            configs_given: !global.configs.is_empty(),
            seed: global.seed,
            json: global.json,
            told: Told::default(),
            output: Mutex::default(),
        }
    }

    /// The same session on a device that does not check how work uses memory, unless the user asked
    /// for that: for commands that measure.
    #[must_use]
    pub fn unchecked(mut self) -> Session {
        if let DeviceSpec::Sim(sim) = &mut self.device.spec
            && !self.device.text.contains("checks=")
        {
            sim.checks = false;
        }
        self
    }

    fn announce(&self, reason: Option<&str>) -> Result<(), Failure> {
        let name = self.open()?.info().name.clone();
        let why = reason.unwrap_or("as asked for with --device");
        self.message(format_args!("device {}: {name} ({why})", self.device.text));
        Ok(())
    }

    /// The device as the user wrote it.
    pub fn device_text(&self) -> &str {
        &self.device.text
    }

    /// Whether the user named no device.
    pub fn is_default_device(&self) -> bool {
        !self.device_given
    }

    /// The configuration of the simulated device, unless the device is a real one.
    pub fn sim(&self) -> Option<&SimConfig> {
        match &self.device.spec {
            DeviceSpec::Sim(sim) => Some(sim),
            _ => None,
        }
    }

    /// Opens the device: a fresh one for each call if it is simulated.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(&self) -> Result<Device, Failure> {
        Ok(self.device.spec.open()?)
    }

    /// Opens the device with another seed, which is nothing to a real one.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open_with_seed(&self, seed: u64) -> Result<Device, Failure> {
        match self.sim() {
            Some(sim) => Ok(Device::new(SimDriver::new(sim.clone().seed(seed)))),
            None => self.open(),
        }
    }

    /// Opens the device, with a handle of the simulator below it if it is a simulated one.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open_with_simulator(&self) -> Result<(Device, Option<Arc<SimDriver>>), Failure> {
        match self.sim() {
            Some(sim) => {
                let driver = SimDriver::new(sim.clone());
                Ok((Device::new(driver.clone()), Some(driver)))
            }
            None => Ok((self.open()?, None)),
        }
    }

    /// Opens another device than this one of the session's: another GPU, the first that can be
    /// opened, or a simulated one like it. `None` where there is no other GPU; one that cannot be
    /// opened is told about.
    pub fn open_another(&self, device: &Device) -> Option<Device> {
        let own = device.info().ordinal;
        if let Some(sim) = self.sim() {
            return Some(Device::new(SimDriver::new(sim.clone().ordinal(own ^ 1))));
        }
        for other in available().iter().filter(|other| other.ordinal != own) {
            match DeviceSpec::Cuda(other.ordinal).open() {
                Ok(device) => return Some(device),
                Err(error) => self.message(format_args!("warning: cuda:{} is left out: {error}", other.ordinal)),
            }
        }
        None
    }

    /// Opens the device so that it lags behind by `lag` events. `None` for a real device, where
    /// nothing but itself lags.
    ///
    /// # Errors
    /// When a real device is to lag.
    pub fn open_lagging(&self, lag: u64) -> Result<Option<Lagged>, Failure> {
        match self.sim() {
            Some(sim) => {
                let driver = SimDriver::new(sim.clone());
                let lag = Lagging::new(driver.clone(), lag);
                Ok(Some(Lagged { device: Device::new(lag.clone()), lag, driver }))
            }
            None if lag == 0 => Ok(None),
            None => Err(Failure::Usage(format!("--lag needs a simulated device, not {}", self.device.text))),
        }
    }

    /// The same session on the simulated device.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn simulated(&self) -> Result<Session, Failure> {
        Session::new(&self.global(Some(SIMULATED.parse()?)))
    }

    /// The same session on a simulated device of which no other program holds memory. `None` if
    /// that is so of this one.
    pub fn without_other_programs(&self) -> Option<Session> {
        let mut device = self.device.clone();
        match &mut device.spec {
            DeviceSpec::Sim(sim) if sim.other_process_bytes > 0 => sim.other_process_bytes = 0,
            _ => return None,
        }
        Some(Session::of(&self.global(None), device))
    }

    /// What the user asked for, but for the device.
    fn global(&self, device: Option<DeviceArg>) -> Global {
        let configs = if self.configs_given { self.configs.clone() } else { Vec::new() };
        Global { device, configs, seed: self.seed, json: self.json }
    }

    /// The most memory that [`Session::sized`] gives.
    ///
    /// # Errors
    /// When the device cannot be opened, and errors of the driver.
    pub fn most_bytes(&self) -> Result<u64, Failure> {
        match self.sim() {
            Some(_) => Ok(CAPACITY_BYTES_MAX),
            None => Ok(self.open()?.memory_info()?.free),
        }
    }

    /// A device with that much memory for an allocator with these options: a simulated one of this
    /// size, or else the real one, with a limit in the options.
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

    /// Opens the simulated device with another capacity; the device itself if it is a real one.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open_with_capacity(&self, bytes: u64) -> Result<Device, Failure> {
        match self.sim() {
            Some(sim) => {
                let mut sim = sim.clone();
                sim.capacity_bytes = bytes;
                Ok(Device::new(SimDriver::new(sim)))
            }
            None => self.open(),
        }
    }

    /// Opens a simulated device with that much memory: like the session's, if that is a simulated
    /// one.
    pub fn open_simulated(&self, bytes: u64) -> Device {
        let mut sim = self.sim().cloned().unwrap_or_else(|| SimConfig::new(bytes));
        sim.capacity_bytes = bytes;
        Device::new(SimDriver::new(sim))
    }

    /// The options to work with, in the order given; at least one.
    pub fn configs(&self) -> &[ConfigArg] {
        &self.configs
    }

    /// The options that the user gave; if none, `usual`.
    pub fn configs_or(&self, usual: &[&str]) -> Vec<ConfigArg> {
        if self.configs_given {
            return self.configs.clone();
        }
        usual.iter().filter_map(|text| text.parse().ok()).collect()
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

    /// Warns of options that the user gave to a command without an allocator.
    pub fn without_allocator(&self) {
        if self.configs_given {
            self.message("warning: --config has no effect here: this command uses no allocator");
        }
    }

    /// An allocator. What its making warns of, such as a device that cannot map memory or options
    /// without effect, is told once a session.
    ///
    /// # Errors
    /// Those of the allocator.
    pub fn allocator(&self, device: &Device, config: &ConfigArg) -> Result<Allocator, Failure> {
        let make = || Allocator::new(device, config.config.clone());
        let tell = |line: &str| {
            let whose = if line.starts_with(IGNORED_OPTIONS) { &*format!("--config '{}': ", config.text) } else { "" };
            self.message(format_args!("warning: {whose}{line}"));
        };
        Ok(self.told.once(make, tell)?)
    }

    /// The seed of generated workloads.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether results are JSON rows.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Writes a row of results if they are to be JSON.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn row(&self, row: &impl Serialize) -> Result<(), Failure> {
        if !self.json {
            return Ok(());
        }
        let mut line = serde_json::to_vec(row).map_err(|error| Failure::Output(error.into()))?;
        line.push(b'\n');
        self.write(&line)
    }

    /// Writes results for people, followed by a line end, unless they are to be JSON.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn show(&self, text: impl Display) -> Result<(), Failure> {
        if self.json { Ok(()) } else { self.write(format!("{text}\n").as_bytes()) }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        let _whole_lines = self.output.lock();
        write_all(bytes)
    }

    /// Writes a message to standard error.
    pub fn message(&self, text: impl Display) {
        let _whole_lines = self.output.lock();
        // Where standard error is closed there is nobody left to tell.
        let _ = writeln!(std::io::stderr(), "{text}");
    }

    /// A progress bar on standard error, invisible where that is no terminal.
    pub fn progress(&self, steps: u64, what: &str) -> ProgressBar {
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg}");
        let bar = ProgressBar::new(steps).with_prefix(what.to_owned());
        if let Ok(style) = style { bar.with_style(style) } else { bar }
    }
}

fn write_all(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}
