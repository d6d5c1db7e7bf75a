//! The configuration of a simulated device: capacity, speed, seed, faults.

use std::fmt;

use crate::fault::Fault;
use crate::parse::{self, SimConfigError};
use crate::preset::{Card, Preset};

/// The largest memory that a simulated device can have, in bytes: 64 TiB.
pub const CAPACITY_BYTES_MAX: u64 = 1 << 46;

/// Configuration of a simulated device.
///
/// ```
/// use aquifer::device::sim::{Preset, SimConfig};
/// let config = SimConfig::new(24 << 30).seed(7);
/// assert_eq!(SimConfig::parse("24GiB,seed=7")?, config);
/// assert_eq!(SimConfig::parse("rtx4090")?, SimConfig::preset(Preset::Rtx4090));
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SimConfig {
    /// Memory of the device in bytes, 1 to [`CAPACITY_BYTES_MAX`]. All of it can be allocated.
    pub capacity_bytes: u64,
    /// The card whose speed the device has.
    pub preset: Preset,
    /// Speed of the link to the host, each way, in GB/s (bytes a virtual ns); `None` for that of
    /// the card.
    pub link_gb_s: Option<u64>,
    /// Ordinal among the devices of the process.
    pub ordinal: u32,
    /// Seed of everything that chance decides: durations, the order of unordered work, random
    /// faults.
    pub seed: u64,
    /// Whether durations vary, with occasional long stalls, so that seeds explore different
    /// interleavings.
    pub jitter: bool,
    /// Whether the device can map physical memory at reserved addresses.
    pub vmm: bool,
    /// Bytes of addresses that can be reserved, at most 512 TiB; `None` for 64 times the memory. The
    /// preset `orin` has few.
    pub addresses: Option<u64>,
    /// Whether its physical memory can be exported as handles, where it can map memory.
    pub export: bool,
    /// Bytes of the device that another process holds.
    pub other_process_bytes: u64,
    /// Whether a violation panics. Work that goes beyond its memory, or uses memory that is gone,
    /// panics in the call that enqueues it. Anything else, such as a race, panics in the next call
    /// that waits for a stream, an event or the device, or when the last handle of the device is
    /// dropped. Nothing panics on a thread that panics already. A violation that was taken does not
    /// panic.
    pub panic_on_violation: bool,
    /// Whether the device checks the bounds and lives of the blocks that allocators hand out, and
    /// reads of memory that was never written. On by default; programs that measure time turn it
    /// off. The race detector works without.
    pub checks: bool,
    /// Whether freed addresses serve later plain allocations, at the lowest that is free. Otherwise
    /// each gets addresses above those of all earlier ones while there are any, so that the oldest
    /// has the lowest.
    pub reuse: bool,
    /// Faults to inject from the start.
    pub faults: Vec<Fault>,
}

/// As [`SimConfig::parse`] reads it.
impl fmt::Display for SimConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let switch = |on: bool| if on { "on" } else { "off" };
        write!(f, "{},size={},seed={}", self.preset.name(), self.capacity_bytes, self.seed)?;
        write!(f, ",jitter={},vmm={},export={}", switch(self.jitter), switch(self.vmm), switch(self.export))?;
        let violations = if self.panic_on_violation { "panic" } else { "report" };
        write!(f, ",checks={},reuse={},violations={violations}", switch(self.checks), switch(self.reuse))?;
        write!(f, ",other={}", self.other_process_bytes)?;
        if self.ordinal > 0 {
            write!(f, ",ordinal={}", self.ordinal)?;
        }
        if let Some(bytes) = self.addresses {
            write!(f, ",addresses={bytes}")?;
        }
        if let Some(gb_s) = self.link_gb_s {
            write!(f, ",link={gb_s}")?;
        }
        self.faults.iter().try_for_each(|fault| write!(f, ",{fault}"))
    }
}

impl Default for SimConfig {
    /// 80 GiB with the speed of an H100, seed 0.
    fn default() -> Self {
        SimConfig::preset(Preset::H100)
    }
}

impl SimConfig {
    /// A device with `capacity_bytes` of memory, at most [`CAPACITY_BYTES_MAX`], and the speed of
    /// an H100.
    pub fn new(capacity_bytes: u64) -> Self {
        SimConfig { capacity_bytes: capacity_bytes.clamp(1, CAPACITY_BYTES_MAX), ..SimConfig::default() }
    }

    /// A device with the capacity and speed of a card.
    pub fn preset(preset: Preset) -> Self {
        SimConfig {
            capacity_bytes: preset.memory_bytes(),
            preset,
            link_gb_s: None,
            ordinal: 0,
            seed: 0,
            jitter: true,
            vmm: true,
            addresses: preset.addresses(),
            export: true,
            other_process_bytes: 0,
            panic_on_violation: false,
            checks: true,
            reuse: true,
            faults: Vec::new(),
        }
    }

    /// Reads the part of a device string after `sim:`: `[SIZE|PRESET][,key=value]…`, where the
    /// whole may be empty.
    ///
    /// Sizes are bytes or take a unit (`KiB`, `MiB`, `GiB`, `TiB`, or decimal `KB`, `MB`, `GB`,
    /// `TB`), before which decimals are allowed: `27.9GiB`.
    ///
    /// | key | value | meaning |
    /// | --- | --- | --- |
    /// | `size` | size | memory of the device, when the first part names a preset |
    /// | `seed` | number | see [`SimConfig::seed`] |
    /// | `jitter`, `vmm`, `export`, `checks`, `reuse` | `on` or `off` | see the fields of the same names |
    /// | `violations` | `report` or `panic` | see [`SimConfig::panic_on_violation`] |
    /// | `link` | number | see [`SimConfig::link_gb_s`] |
    /// | `other` | size | bytes held by another process |
    /// | `addresses` | size | see [`SimConfig::addresses`] |
    /// | `fault` | `CALL#N:CODE` | the Nth `CALL` fails, such as `cuMemAlloc#3:out_of_memory` or `any#17:999` |
    /// | `fault_rate` | `[CALL:]RATE[:CODE]` | calls fail at random, such as `0.01`, `cuMemAlloc:0.05` or `0.01:out_of_memory` |
    /// | `oom_at` | size | allocations that would hold more than this fail |
    /// | `lost_at` | number | the device is lost at this call |
    /// | `spike` | `RATE:DURATION` | calls take longer at random, such as `0.001:5ms` (`ns`, `us`, `ms`, `s`) |
    ///
    /// ```
    /// use aquifer::device::sim::SimConfig;
    /// let config = SimConfig::parse("h100,seed=7,fault=cuMemAlloc#3:out_of_memory")?;
    /// assert_eq!((config.capacity_bytes, config.seed, config.faults.len()), (80 << 30, 7, 1));
    /// let error = SimConfig::parse("80GiB,sede=7").unwrap_err();
    /// assert_eq!((error.text.as_str(), error.offset), ("sede", 6));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// When a part cannot be understood; the error names it, its place, and the expected text.
    pub fn parse(text: &str) -> Result<SimConfig, SimConfigError> {
        parse::config(text)
    }

    /// Sets [`SimConfig::ordinal`].
    #[must_use]
    pub fn ordinal(mut self, ordinal: u32) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// Bandwidth of the link to the host, in GB/s: [`SimConfig::link_gb_s`], or that of the card.
    pub fn card_link_gb_s(&self) -> u64 {
        self.card().link_gb_s
    }

    /// The card, as far as nothing else was asked for.
    pub(crate) fn card(&self) -> Card {
        let card = self.preset.card();
        Card { link_gb_s: self.link_gb_s.map_or(card.link_gb_s, |gb_s| gb_s.max(1)), ..card }
    }

    /// Sets [`SimConfig::seed`].
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets [`SimConfig::jitter`].
    #[must_use]
    pub fn jitter(mut self, jitter: bool) -> Self {
        self.jitter = jitter;
        self
    }

    /// Sets [`SimConfig::other_process_bytes`].
    #[must_use]
    pub fn other_process_bytes(mut self, bytes: u64) -> Self {
        self.other_process_bytes = bytes;
        self
    }

    /// Sets [`SimConfig::checks`].
    #[must_use]
    pub fn checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    /// Adds a fault.
    #[must_use]
    pub fn fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }
}
