//! Statistics of an allocator under PyTorch's names, and as a table, laid out as PyTorch's
//! `memory_summary()`; and the holders of a device's memory.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

use aquifer_device::{MemoryUsers, Operation, Result, fork};

use crate::accounting::attribution::{Attribution, driver_bytes_of_graphs, used};
use crate::accounting::fragmentation::held_in;
use crate::allocator::{Allocator, all_states};
use crate::core::counters::{MemoryStats, PoolStats, Stat};
use crate::core::limits::Holding;
use crate::error::AllocError;

impl MemoryStats {
    /// The 123 entries of PyTorch's `memory_stats()`, by its keys, such as
    /// `allocated_bytes.all.peak`.
    ///
    /// Some are always the same here. Free pieces of segments (`inactive_split` and
    /// `inactive_split_bytes`) are not counted, and are 0: a snapshot has them. No block is oversize, so
    /// `oversize_allocations` and `oversize_segments` are 0, and `max_split_size` is -1 for unlimited.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let buffer = memory.alloc_bytes(1_000, device.default_stream())?;
    /// let stats = memory.stats().to_map();
    /// assert_eq!(stats["allocated_bytes.small_pool.current"], 1024);
    /// assert_eq!(stats["requested_bytes.all.peak"], 1000);
    /// assert_eq!(stats["max_split_size"], -1);
    /// # drop(buffer);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn to_map(&self) -> BTreeMap<String, i64> {
        let pooled = [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &PoolStats::default()),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &PoolStats::default()),
            ("requested_bytes", &self.requested_bytes),
        ];
        let plain = [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_oom_rejections", self.num_oom_rejections),
        ];
        let mut map: BTreeMap<String, i64> =
            plain.into_iter().map(|(name, count)| (name.to_owned(), integer(count))).collect();
        for (name, stats) in pooled {
            insert(&mut map, &format!("{name}.all"), stats.all);
            insert(&mut map, &format!("{name}.large_pool"), stats.large_pool);
            insert(&mut map, &format!("{name}.small_pool"), stats.small_pool);
        }
        insert(&mut map, "oversize_allocations", Stat::default());
        insert(&mut map, "oversize_segments", Stat::default());
        map.insert("max_split_size".to_owned(), -1);
        map
    }
}

/// Puts the four values of a statistic into the map.
fn insert(map: &mut BTreeMap<String, i64>, name: &str, stat: Stat) {
    let Stat { current, peak, allocated, freed } = stat;
    for (part, value) in [("current", current), ("peak", peak), ("allocated", allocated), ("freed", freed)] {
        map.insert(format!("{name}.{part}"), integer(value));
    }
}

/// A count as a signed integer, as PyTorch has; larger counts than that holds are cut off.
fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Allocator {
    /// The most bytes that were allocated at once since the last [`Allocator::reset_peak_stats`],
    /// as PyTorch's `max_memory_allocated()`.
    pub fn max_memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.peak
    }

    /// The most bytes that were reserved from the device at once since the last
    /// [`Allocator::reset_peak_stats`], as PyTorch's `max_memory_reserved()`.
    pub fn max_memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.peak
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        self.state().enter().counters.reset_peaks();
    }

    /// Starts the accumulated values (`allocated`, `freed`) and the numbers of events (`num_…`)
    /// from zero.
    pub fn reset_accumulated_stats(&self) {
        self.state().enter().counters.reset_accumulated();
    }

    /// The allocator's statistics.
    pub fn stats(&self) -> MemoryStats {
        self.state().read(|shared| shared.counters.read())
    }

    /// Bytes that each private pool holds from the device, by its id, for open pools and for closed
    /// ones that still hold memory. They are part of `reserved_bytes`.
    pub fn reserved_by_private_pools(&self) -> BTreeMap<(u64, u64), u64> {
        let shared = self.state().shared();
        let open = shared.pools.iter().filter(|private| private.open);
        let mut bytes: BTreeMap<(u64, u64), u64> = open.map(|private| (private.id, 0)).collect();
        for region in shared.heap().regions() {
            let Some(private) = shared.pools.owner_of(region.pool) else { continue };
            let held = held_in(&shared, region);
            if held > 0 {
                *bytes.entry(private.id).or_default() += held;
            }
        }
        bytes
    }
}

/// Characters of a line between its outer bars.
const WIDTH: usize = 75;
/// Characters of a value: a number of seven places and its unit.
const BYTE_UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNT_UNITS: [&str; 3] = [" ", "K", "M"];

/// The unit of a row.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Count,
}

impl Unit {
    /// Formats `value` in ten characters, in the unit that suits `guide`, so that rows that belong
    /// together share one unit.
    fn format(self, value: u64, guide: u64) -> String {
        match self {
            Unit::Bytes => {
                let (value, unit) = scale(value, guide, 1024, 768 * 1024, &BYTE_UNITS);
                format!("{value:6} {unit:<3}")
            }
            Unit::Count => {
                let (value, unit) = scale(value, guide, 1000, 750 * 1000, &COUNT_UNITS);
                format!("{value:7} {unit} ")
            }
        }
    }
}

/// Divides both by `step` until `guide` is below `most`.
fn scale(mut value: u64, mut guide: u64, step: u64, most: u64, units: &[&'static str]) -> (u64, &'static str) {
    let mut unit = 0;
    while guide >= most && unit + 1 < units.len() {
        (value, guide, unit) = (value / step, guide / step, unit + 1);
    }
    (value, units[unit])
}

/// The lines of the table so far.
struct Table(String);

impl Table {
    fn rule(&mut self, of: char) {
        self.line(&String::from(of).repeat(WIDTH));
    }

    fn line(&mut self, text: &str) {
        let text: String = text.chars().take(WIDTH).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "|{text:<WIDTH$}|");
    }

    fn row(&mut self, name: &str, unit: Unit, stat: Stat, guide: Stat) {
        let current = unit.format(stat.current, guide.current);
        let peak = unit.format(stat.peak, guide.peak);
        let allocated = unit.format(stat.allocated, guide.allocated);
        let freed = unit.format(stat.freed, guide.freed);
        self.line(&format!(" {name:<21} | {current} | {peak} | {allocated} | {freed} "));
    }

    fn rows(&mut self, name: &str, unit: Unit, stats: &PoolStats) {
        self.rule('-');
        self.row(name, unit, stats.all, stats.all);
        self.row("      from large pool", unit, stats.large_pool, stats.all);
        self.row("      from small pool", unit, stats.small_pool, stats.all);
    }

    fn device(&mut self, memory: &Attribution) {
        let driver = ("the driver, in addition".to_owned(), memory.driver.unwrap_or(0));
        let headroom =
            (format!("suggested headroom (headroom_mb:{})", memory.headroom_mb()), memory.suggested_headroom);
        let rows = [("free".to_owned(), memory.free), ("this allocator".to_owned(), memory.reserved)];
        let more = [driver, headroom].into_iter().filter(|&(_, bytes)| bytes > 0);
        let mut row = |name: &str, bytes| {
            self.line(&format!(" {name:<60} | {} ", Unit::Bytes.format(bytes, memory.total)));
        };
        let shared = if memory.shares_host_memory { ", shared with the host" } else { "" };
        row(&format!("Device memory{shared}"), memory.total);
        for (name, bytes) in rows.into_iter().chain(memory.others()).chain(more) {
            row(&format!("      {name}"), bytes);
        }
        self.rule('=');
    }
}

impl Allocator {
    /// A table of the statistics: bytes and numbers of allocated, active and reserved memory and so
    /// on, each with the current value, the peak, and the sums of increases and decreases. Below
    /// them is the device's memory by holder ([`Allocator::attribution`]), unless the driver fails.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// print!("{}", memory.summary());
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn summary(&self) -> String {
        let info = self.device().info();
        let title = format!("Aquifer memory summary, device {}: {}", info.ordinal, info.name);
        write_summary(&title, &self.stats(), attribute(self, Some(Duration::ZERO)).ok().as_ref())
    }
}

/// The table of [`Allocator::summary`].
impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(write_summary("Aquifer memory summary", self, None).trim_end())
    }
}

fn write_summary(title: &str, stats: &MemoryStats, memory: Option<&Attribution>) -> String {
    let mut table = Table(String::new());
    table.rule('=');
    table.line(&format!("{title:^WIDTH$}"));
    table.rule('-');
    let ooms = format!("Out of memory: {}", stats.num_ooms);
    let retries = format!("Retries after a flush: {}", stats.num_alloc_retries);
    table.line(&format!("{ooms:^37}|{retries:^37}"));
    table.rule('=');
    table.line("        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ");
    let rows = [
        ("Allocated memory", Unit::Bytes, &stats.allocated_bytes),
        ("Active memory", Unit::Bytes, &stats.active_bytes),
        ("Requested memory", Unit::Bytes, &stats.requested_bytes),
        ("GPU reserved memory", Unit::Bytes, &stats.reserved_bytes),
        ("Allocations", Unit::Count, &stats.allocation),
        ("Active allocs", Unit::Count, &stats.active),
        ("GPU reserved segments", Unit::Count, &stats.segment),
    ];
    for (name, unit, stats) in rows {
        table.rows(name, unit, stats);
    }
    table.rule('=');
    if let Some(memory) = memory {
        table.device(memory);
    }
    table.0
}

/// Attributes the device's memory to its holders. The caller holds no lock. An answer about the
/// processes of a GPU serves for `max_age`; without `max_age`, processes stay unknown.
pub(crate) fn attribute(allocator: &Allocator, max_age: Option<Duration>) -> Result<Attribution> {
    fork::check(Operation::MemoryInfo)?;
    let device = allocator.device();
    let held = || all_states().into_iter().map(|state| (state, state.shared().held_on(device))).collect::<Vec<_>>();
    let before = held();
    let memory = device.memory_info()?;
    let is_recent = |at: &Instant| !device.info().is_virtual && max_age.is_some_and(|max_age| at.elapsed() < max_age);
    let recent = allocator.inner().outside.lock().last.clone().filter(|(at, _)| is_recent(at));
    let asks = recent.is_none() && max_age.is_some();
    let users = if asks { device.memory_users() } else { MemoryUsers::default() };
    let after = held();

    // Other threads take memory and give it back meanwhile: that is no growth of others.
    let (mut ours, mut least, mut most) = (0_u64, 0_u64, 0_u64);
    for (state, after) in &after {
        let before = before.iter().find(|(other, _)| std::ptr::eq(*other, *state));
        let before = before.map_or_else(Holding::default, |(_, before)| *before);
        ours = ours.saturating_add(after.bytes);
        least = least.saturating_add(before.bytes.min(after.bytes));
        most = most.saturating_add(before.most_until(after));
    }
    let reserved = allocator.state().shared().held_on(device).bytes;
    // Less than this process's allocators hold is said of another process of the same id.
    let own = users.own.filter(|&own| own >= least);
    let (rest_of_process, other_processes, driver) = match (&recent, own) {
        (Some((_, last)), _) => (last.rest_of_process, last.other_processes.clone(), last.driver),
        (None, Some(own)) => (Some(own.saturating_sub(ours)), users.others, users.driver),
        (None, None) => (None, Vec::new(), users.driver),
    };
    let rest = rest_of_process.unwrap_or(0);
    let attributed = other_processes.iter().fold(ours.saturating_add(rest), |sum, one| sum.saturating_add(one.bytes));

    let unattributed = used(memory).saturating_sub(attributed);
    // Where the driver has no pool, it says nothing of graphs.
    let graphs = device.driver().pool_usage().map_or(0, |usage| usage.graphs);
    let graphs = driver_bytes_of_graphs(device.id()).saturating_add(graphs);
    let mut outside = allocator.inner().outside.lock();
    let grown = used(memory).saturating_sub(most).saturating_sub(outside.at_open);
    outside.growth = outside.growth.max(grown);
    if let Some(own) = own {
        outside.least_of_process = outside.least_of_process.min(own.saturating_sub(least));
        let grown = own.saturating_sub(most).saturating_sub(outside.least_of_process);
        outside.growth_of_process = outside.growth_of_process.max(Some(grown));
    }
    let attribution = Attribution {
        total: memory.total,
        shares_host_memory: device.info().shares_host_memory,
        free: memory.free,
        reserved,
        other_allocators: ours.saturating_sub(reserved),
        rest_of_process,
        graphs: graphs.min(rest_of_process.unwrap_or(unattributed)),
        other_processes,
        unattributed,
        driver,
        outside_at_open: outside.at_open,
        suggested_headroom: outside.growth_of_process.unwrap_or(outside.growth),
    };
    if asks {
        outside.last = Some((Instant::now(), attribution.clone()));
    }
    Ok(attribution)
}

impl Allocator {
    /// The device's memory by holder: this allocator, others of the process, the rest of the
    /// process, other processes; and a headroom for libraries.
    ///
    /// Asks the driver, and on a GPU NVML, which takes milliseconds at the first call
    /// ([`aquifer_device::Device::memory_users`]).
    ///
    /// # Errors
    /// When the driver cannot tell the device's memory.
    pub fn attribution(&self) -> Result<Attribution, AllocError> {
        Ok(attribute(self, Some(Duration::ZERO))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_change_where_pytorch_changes_them() {
        let bytes = |value| Unit::Bytes.format(value, value);
        assert_eq!(bytes(0), "     0 B  ");
        assert_eq!(bytes(768 * 1024 - 1), "786431 B  ");
        assert_eq!(bytes(768 * 1024), "   768 KiB");
        assert_eq!(bytes(768 << 20), "   768 MiB");
        assert_eq!(bytes((768 << 20) - 1), "786431 KiB");
        let count = |value| Unit::Count.format(value, value);
        assert_eq!(count(749_999), " 749999   ");
        assert_eq!(count(750_000), "    750 K ");
        assert_eq!(count(750_000_000), "    750 M ");
        assert_eq!(
            Unit::Count.format(u64::MAX, 10),
            "18446744073709551615   ",
            "never in a smaller unit than its guide"
        );
    }

    #[test]
    fn every_line_is_as_wide() {
        let long = "x".repeat(100);
        for title in ["short", &*long] {
            let text = write_summary(title, &MemoryStats::default(), None);
            assert_eq!(text.lines().count(), 35, "{text}");
            assert!(text.lines().all(|line| line.len() == WIDTH + 2), "{text}");
        }
    }

    #[test]
    fn parts_share_the_unit_of_their_sum() {
        let mut stats = MemoryStats::default();
        stats.allocated_bytes.all.current = 100 << 20;
        stats.allocated_bytes.small_pool.current = 5 << 10;
        let text = write_summary("title", &stats, None);
        assert!(text.contains("| Allocated memory      | 102400 KiB |      0 B   |"), "{text}");
        assert!(text.contains("|       from small pool |      5 KiB |      0 B   |"), "{text}");
    }
}
