//! Statistics as a table, laid out as PyTorch's `memory_summary()`.

use std::fmt::{self, Write};
use std::time::Duration;

use crate::accounting::attribute::attribute;
use crate::accounting::attribution::Attribution;
use crate::accounting::memory_stats::MemoryStats;
use crate::accounting::stat::{PoolStats, Stat};
use crate::allocator::Allocator;

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
        row("Device memory", memory.total);
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
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// print!("{}", allocator.summary());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
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
