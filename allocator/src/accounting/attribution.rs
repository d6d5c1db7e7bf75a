//! The holders of a device's memory, and a suggested headroom.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use aquifer_device::fork::Mutex;
use aquifer_device::{MemoryInfo, ProcessMemory};

use crate::format::Bytes;

/// Bytes that drivers took for graphs, by identity of the device.
static OF_GRAPHS: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());

/// Bytes that the driver of a device took for graphs that exist, as
/// [`GraphUses::note_driver_bytes`](crate::GraphUses::note_driver_bytes) was told.
pub(super) fn driver_bytes_of_graphs(device_id: u32) -> u64 {
    OF_GRAPHS.lock().get(&device_id).copied().unwrap_or(0)
}

/// Notes for one graph that the driver took `now` bytes, where `was` was noted before.
pub(crate) fn replace_driver_bytes_of_graph(device_id: u32, was: u64, now: u64) {
    let mut all = OF_GRAPHS.lock();
    let of_device = all.entry(device_id).or_default();
    *of_device = of_device.saturating_sub(was).saturating_add(now);
}

/// The memory of a device by holder, as [`crate::Allocator::attribution`] returns it. All sizes are
/// bytes.
///
/// The total is the sum of the free, the held and the unattributed bytes. The parts are read one
/// after the other: while memory is taken and given back, the sum may be off by as much.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB,other=2GiB")?;
/// let memory = Allocator::of(&device)?;
/// let block = memory.alloc_bytes(5 << 30, device.default_stream())?;
/// device.alloc(1 << 30)?; // as a library would
/// let held = memory.attribution()?;
/// assert_eq!((held.reserved, held.rest_of_process), (5 << 30, Some(1 << 30)));
/// assert_eq!(held.other_processes[0].bytes, 2 << 30);
/// assert_eq!(held.suggested_headroom, 1 << 30);
/// println!("{held}");
/// # drop(block);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attribution {
    /// Bytes that the device has.
    pub total: u64,
    /// True if that is the host's memory, so that what the host's programs use counts as held by
    /// others.
    pub shares_host_memory: bool,
    /// Bytes that no process holds.
    pub free: u64,
    /// Bytes that this allocator holds, those on their way back to the device included.
    pub reserved: u64,
    /// Bytes that other allocators of this process hold for the same device, also those that were
    /// dropped while buffers of them live.
    pub other_allocators: u64,
    /// Bytes that this process holds otherwise: contexts, modules, memory of libraries. `None`
    /// where unknown ([`aquifer_device::Device::memory_users`]).
    pub rest_of_process: Option<u64>,
    /// Bytes of these that the driver holds for graphs: memory of allocations within graphs, used
    /// or not, and what it took for the graphs of `aquifer::Allocator::graph` that exist, an
    /// estimate: the difference in free memory over their instantiations. Of `unattributed` where
    /// `rest_of_process` is unknown.
    pub graphs: u64,
    /// Other processes, by descending bytes. Empty where `rest_of_process` is unknown.
    pub other_processes: Vec<ProcessMemory>,
    /// Bytes in use that no known holder accounts for.
    pub unattributed: u64,
    /// Bytes that the driver and the firmware reserve, in addition to the total; `None` where
    /// unknown.
    pub driver: Option<u64>,
    /// Bytes that no allocator of this process held when this one opened.
    pub outside_at_open: u64,
    /// The most by which `rest_of_process` was seen to grow since this allocator opened, as when
    /// libraries take memory. A process that sets the option `headroom_mb` to it leaves room for
    /// them from the start. An allocator looks when it is asked for this or for a summary, and when
    /// the device refuses a request.
    ///
    /// Where `rest_of_process` is unknown, it includes growth of other processes. On a GPU of which
    /// other processes held a part at opening, growth before the first look may be missing.
    pub suggested_headroom: u64,
}

/// Processes that are listed one by one.
const LISTED: usize = 5;

impl Attribution {
    /// Bytes in use that this allocator does not hold.
    pub fn held_by_others(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.reserved)
    }

    /// The other holders and their bytes.
    pub(crate) fn others(&self) -> Vec<(String, u64)> {
        // A list of the rest stands for several.
        let listed = if self.other_processes.len() > LISTED + 1 { LISTED } else { self.other_processes.len() };
        let (listed, more) = self.other_processes.split_at(listed);
        let mut all = vec![
            ("other allocators of this process".to_owned(), self.other_allocators),
            ("the driver for graphs (estimated)".to_owned(), self.graphs),
            (
                "the rest of this process (context, modules, libraries)".to_owned(),
                self.rest_of_process.map_or(0, |rest| rest.saturating_sub(self.graphs)),
            ),
        ];
        let name = |pid: Option<u32>| pid.map_or("another process".to_owned(), |pid| format!("process {pid}"));
        all.extend(listed.iter().map(|one| (name(one.pid), one.bytes)));
        all.push((format!("{} more processes", more.len()), more.iter().map(|one| one.bytes).sum()));
        all.retain(|(_, bytes)| *bytes > 0);
        let of_graphs = if self.rest_of_process.is_none() { self.graphs } else { 0 };
        let unattributed = self.unattributed.saturating_sub(of_graphs);
        if unattributed > 0 {
            let who = if all.is_empty() { "others than this allocator" } else { "others" };
            all.push((who.to_owned(), unattributed));
        }
        all
    }

    /// The suggested headroom as a value of the option `headroom_mb`.
    pub(crate) fn headroom_mb(&self) -> u64 {
        self.suggested_headroom.div_ceil(1 << 20)
    }
}

impl fmt::Display for Attribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = if self.shares_host_memory { ", shared with the host" } else { "" };
        write!(f, "{} in total{shared}, {} free. ", Bytes(self.total), Bytes(self.free))?;
        let own = ("this allocator".to_owned(), self.reserved);
        write_holders(f, [own].into_iter().chain(self.others()))?;
        if let Some(driver) = self.driver.filter(|&bytes| bytes > 0) {
            write!(f, " The driver reserves {} in addition.", Bytes(driver))?;
        }
        if self.suggested_headroom > 0 {
            write!(f, " Suggested headroom: {} (headroom_mb:{}).", Bytes(self.suggested_headroom), self.headroom_mb())?;
        }
        Ok(())
    }
}

/// Writes a sentence: `1.00 GiB is held by process 7, 2.00 GiB by others.`
pub(crate) fn write_holders(
    f: &mut fmt::Formatter<'_>,
    holders: impl IntoIterator<Item = (String, u64)>,
) -> fmt::Result {
    for (at, (who, bytes)) in holders.into_iter().enumerate() {
        let (start, verb) = if at == 0 { ("", " is held") } else { (", ", "") };
        write!(f, "{start}{}{verb} by {who}", Bytes(bytes))?;
    }
    f.write_str(".")
}

/// Baseline and growth of the memory that no allocator of the process holds.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) at_open: u64,
    /// The most by which that has grown.
    pub(crate) growth: u64,
    /// At most as much of it was this process's when that was least.
    pub(crate) least_of_process: u64,
    /// The most by which the process's part has grown from there, if known.
    pub(crate) growth_of_process: Option<u64>,
    /// The last answer about processes.
    pub(crate) last: Option<(Instant, Attribution)>,
}

impl Outside {
    /// For an allocator that opens when the device has this memory, and other allocators hold
    /// `held` bytes; `own` is what the process holds, if known.
    pub(crate) fn at_open(memory: MemoryInfo, held: u64, own: Option<u64>) -> Outside {
        let at_open = used(memory).saturating_sub(held);
        let least_of_process = own.map_or(at_open, |own| own.saturating_sub(held));
        Outside { at_open, growth: 0, least_of_process, growth_of_process: None, last: None }
    }
}

/// Bytes in use.
pub(crate) fn used(memory: MemoryInfo) -> u64 {
    memory.total.saturating_sub(memory.free)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribution() -> Attribution {
        Attribution {
            total: 24 << 30,
            shares_host_memory: false,
            free: 1 << 30,
            reserved: 8 << 30,
            other_allocators: 0,
            rest_of_process: None,
            graphs: 0,
            other_processes: Vec::new(),
            unattributed: 15 << 30,
            driver: None,
            outside_at_open: 0,
            suggested_headroom: 0,
        }
    }

    #[test]
    fn what_is_not_known_is_held_by_others() {
        let text = attribution().to_string();
        let expected = "24.00 GiB in total, 1.00 GiB free. 8.00 GiB is held by this allocator, 15.00 GiB by others \
                        than this allocator.";
        assert_eq!(text, expected);
    }

    #[test]
    fn graphs_are_named_as_a_part_of_the_process_or_of_what_is_not_known() {
        let mut memory = attribution();
        memory.graphs = 3 << 30;
        let text = memory.to_string();
        assert!(text.contains("3.00 GiB by the driver for graphs (estimated), 12.00 GiB by others."), "{text}");
        (memory.rest_of_process, memory.unattributed) = (Some(4 << 30), 11 << 30);
        let text = memory.to_string();
        assert!(text.contains("3.00 GiB by the driver for graphs (estimated), 1.00 GiB by the rest"), "{text}");
        assert!(text.contains("11.00 GiB by others."), "{text}");
    }

    #[test]
    fn each_holder_is_named_and_small_processes_are_added_up() {
        let process = |pid, mib| ProcessMemory::new(pid, mib << 20);
        let mut memory = attribution();
        memory.rest_of_process = Some(3 << 30);
        memory.other_processes = (1..=8).map(|pid| process(Some(pid), u64::from(10 - pid))).collect();
        memory.other_processes[1].pid = None;
        (memory.unattributed, memory.driver) = (1 << 30, Some(512 << 20));
        memory.suggested_headroom = (2 << 30) + 1;
        let expected = "24.00 GiB in total, 1.00 GiB free. 8.00 GiB is held by this allocator, 3.00 GiB by the rest of \
                        this process (context, modules, libraries), 9.00 MiB by process 1, 8.00 MiB by another process, \
                        7.00 MiB by process 3, 6.00 MiB by process 4, 5.00 MiB by process 5, 9.00 MiB by 3 more \
                        processes, 1.00 GiB by others. The driver reserves 512.00 MiB in addition. Suggested headroom: \
                        2.00 GiB (headroom_mb:2049).";
        assert_eq!(memory.to_string(), expected);
    }
}
