//! How much memory the host can still give to this process, for a GPU that shares it.
//!
//! `cuMemGetInfo` of such a GPU leaves out the page cache, which the system takes back when it has
//! to, and knows no limits of control groups.

use std::fs;
use std::path::Path;

/// Bytes that the system and the control groups of this process have left, whichever is least.
/// `None` if the system does not say.
pub(crate) fn available() -> Option<u64> {
    available_below(Path::new("/"))
}

fn available_below(root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let system = number_of(&meminfo, "MemAvailable:")?.saturating_mul(1024);
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let around = own.into_iter().flat_map(|own| Path::new(own).ancestors());
    let left = around.filter_map(|group| left_in(&root.join("sys/fs/cgroup").join(group)));
    Some(left.fold(system, u64::min))
}

/// What a control group of version 2 has left, its page cache included; `None` without a limit.
fn left_in(group: &Path) -> Option<u64> {
    let read = |file| fs::read_to_string(group.join(file)).unwrap_or_default();
    let number = |file| read(file).trim().parse::<u64>().ok();
    let (limit, used, stat) = (number("memory.max")?, number("memory.current")?, read("memory.stat"));
    let cache = ["active_file", "inactive_file"].iter().filter_map(|name| number_of(&stat, name)).sum::<u64>();
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// The number behind a name that begins a line.
fn number_of(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| if words.next() == Some(name) { words.next()?.parse().ok() } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_that_the_system_or_a_control_group_has_left_counts_with_its_page_cache() {
        let root = std::env::temp_dir().join(format!("aquifer-host-memory-{}", std::process::id()));
        let available_with = |file: &str, text: &str| {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            available_below(&root)
        };
        assert_eq!(available_with("proc/meminfo", "MemTotal: 8000 kB\nMemFree: 10 kB\n"), None);
        let system = Some(4000 << 10);
        assert_eq!(available_with("proc/meminfo", "MemFree: 10 kB\nMemAvailable:    4000 kB\n"), system);
        available_with("proc/self/cgroup", "1:cpu:/x\n0::/a/b:c\n");
        available_with("sys/fs/cgroup/a/b:c/memory.current", "100000\n");
        assert_eq!(available_with("sys/fs/cgroup/a/b:c/memory.max", "max\n"), system);
        assert_eq!(available_with("sys/fs/cgroup/a/b:c/memory.max", "1000000\n"), Some(900_000));
        available_with("sys/fs/cgroup/a/memory.max", "500000");
        assert_eq!(available_with("sys/fs/cgroup/a/memory.current", "499000"), Some(1000));
        let stat = "anon 5\nactive_file 20000\ninactive_file 30000\nfile 7\n";
        assert_eq!(available_with("sys/fs/cgroup/a/memory.stat", stat), Some(51_000));
        assert_eq!(available_with("sys/fs/cgroup/a/memory.max", "5"), Some(0));
        fs::remove_dir_all(root).unwrap();
    }
}
