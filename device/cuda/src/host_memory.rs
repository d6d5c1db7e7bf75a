//! How much memory the host can still give to this process, for a GPU that shares it.
//!
//! `cuMemGetInfo` of such a GPU leaves out the page cache, which the system takes back when it has
//! to, and knows no limits of control groups.

use std::fs;
use std::path::Path;

/// Where control groups of a version are, and the files of one: its limit, what it uses, and the
/// entries of `memory.stat` that count its page cache.
struct Version {
    folder: &'static str,
    limit: &'static str,
    used: &'static str,
    cache: [&'static str; 2],
}

const V1: Version = Version {
    folder: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};
const V2: Version = Version {
    folder: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

/// Bytes that the system and the control groups of this process have left, whichever is least.
/// `None` if the system does not say.
pub(crate) fn available() -> Option<u64> {
    available_below(Path::new("/"))
}

fn available_below(root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let system = number_of(&meminfo, "MemAvailable:")?.saturating_mul(1024);
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    Some(groups.lines().flat_map(|line| left_in_groups(root, line)).fold(system, u64::min))
}

/// What the group that a line of `/proc/self/cgroup` names has left, and those around it.
fn left_in_groups(root: &Path, line: &str) -> Vec<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let version = match controllers {
        "" => &V2,
        several if several.split(',').any(|one| one == "memory") => &V1,
        _ => return Vec::new(),
    };
    let groups = Path::new(path.trim_start_matches('/')).ancestors();
    groups.filter_map(|group| left_in(&root.join(version.folder).join(group), version)).collect()
}

/// `None` without a limit.
fn left_in(group: &Path, version: &Version) -> Option<u64> {
    let number = |file| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(version.limit)?, number(version.used)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = version.cache.iter().filter_map(|name| number_of(&stat, name)).fold(0, u64::saturating_add);
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

    /// What is available on a system with these files.
    fn available_with(name: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("aquifer-host-memory-{}-{name}", std::process::id()));
        for (file, text) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let available = available_below(&root);
        let _ = fs::remove_dir_all(root);
        available
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\nCached: 3990 kB\n");
    const SYSTEM: u64 = 4000 << 10;

    #[test]
    fn the_page_cache_counts_as_available() {
        assert_eq!(available_with("none", &[]), None);
        assert_eq!(available_with("old", &[("proc/meminfo", "MemFree: 10 kB\n")]), None);
        assert_eq!(available_with("system", &[MEMINFO]), Some(SYSTEM));
        let unlimited = [MEMINFO, ("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/memory.max", "max\n")];
        assert_eq!(available_with("unlimited", &unlimited), Some(SYSTEM));
    }

    #[test]
    fn every_control_group_around_the_process_counts_less_its_page_cache() {
        let group = |limit, used, stat| {
            [
                MEMINFO,
                ("proc/self/cgroup", "1:cpu:/x\n0::/a/b:c\n"),
                ("sys/fs/cgroup/a/memory.max", limit),
                ("sys/fs/cgroup/a/memory.current", used),
                ("sys/fs/cgroup/a/memory.stat", stat),
                ("sys/fs/cgroup/a/b:c/memory.max", "1000000"),
                ("sys/fs/cgroup/a/b:c/memory.current", "100000\n"),
            ]
        };
        assert_eq!(available_with("inner", &group("5000000\n", "0\n", "")), Some(900_000));
        assert_eq!(available_with("outer", &group("500000\n", "499000\n", "")), Some(1000));
        let stat = "anon 5\nactive_file 20000\ninactive_file 30000\nfile 7\n";
        assert_eq!(available_with("cache", &group("500000\n", "499000\n", stat)), Some(51_000));
        assert_eq!(available_with("over", &group("500\n", "600\n", "")), Some(0));
    }

    #[test]
    fn groups_of_the_first_version_count_where_the_container_hides_their_path() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpuacct,memory:/docker/1234\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "700000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 1000\n"),
        ];
        assert_eq!(available_with("v1", &files), Some(101_000));
    }
}
