//! Memory of common GPUs, to name one on which a program finishes.

/// Names and memory in MiB, as `nvidia-smi` reports it, in ascending order.
const CARDS: [(&str, u64); 14] = [
    ("RTX 4060 (8 GB)", 8188),
    ("RTX 3060 (12 GB)", 12288),
    ("T4 (16 GB)", 15360),
    ("V100 (16 GB)", 16384),
    ("L4 (24 GB)", 23034),
    ("RTX 4090 (24 GB)", 24564),
    ("RTX 5090 (32 GB)", 32607),
    ("A100 (40 GB)", 40960),
    ("L40S (48 GB)", 46068),
    ("RTX A6000 (48 GB)", 49140),
    ("H100 (80 GB)", 81559),
    ("H200 (141 GB)", 143_771),
    ("B200 (180 GB)", 183_359),
    ("B300 (288 GB)", 275_040),
];

/// Memory that a CUDA context and its libraries take, in MiB: some 0.3 to 0.8 GiB.
const CONTEXT: u64 = 512;

/// The smallest of common cards that has this much memory besides a CUDA context.
pub fn smallest_card(bytes: u64) -> Option<&'static str> {
    let fits = |&&(_, mib): &&(&str, u64)| (mib - CONTEXT) << 20 >= bytes;
    CARDS.iter().find(fits).map(|&(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_card_has_room_for_a_context() {
        assert!(CARDS.is_sorted_by_key(|&(_, mib)| mib));
        assert_eq!(smallest_card(0), Some("RTX 4060 (8 GB)"));
        assert_eq!(smallest_card((24564 - 512) << 20), Some("RTX 4090 (24 GB)"));
        assert_eq!(smallest_card(((24564 - 512) << 20) + 1), Some("RTX 5090 (32 GB)"));
        assert_eq!(smallest_card(1 << 40), None);
    }
}
