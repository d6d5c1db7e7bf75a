//! Numbers by stream, the components of vector clocks. Copies share equal parts.
//!
//! A stream that is ordered after thousands of others passes nearly all of its clock on to the next
//! one. So a clock is a tree: a leaf holds the numbers of [`WIDTH`] streams side by side, and an
//! inner node has as many children. A copy takes constant time and no memory. Changing a number
//! copies the nodes on one path, unless no other tree shares them, and joining two trees keeps the
//! subtrees that have the result already.

use std::fmt;
use std::sync::Arc;

/// Binary logarithm of [`WIDTH`].
const BITS: u32 = 4;
/// Number of children of a node, and of numbers in a leaf. A program that uses few streams has one
/// leaf.
const WIDTH: usize = 1 << BITS;

/// A number for each stream; 0 for those that are not listed.
#[derive(Clone, Default)]
pub struct StreamMap {
    root: Option<Arc<Node>>,
    /// Number of inner nodes above each leaf.
    height: u32,
}

#[derive(Clone)]
enum Node {
    Leaf([u64; WIDTH]),
    Inner(Children),
}

type Children = [Option<Arc<Node>>; WIDTH];

impl StreamMap {
    /// The number of a stream.
    pub fn get(&self, stream: u32) -> u64 {
        if !self.reaches(stream) {
            return 0;
        }
        let (mut node, mut height) = (&self.root, self.height);
        loop {
            match node.as_deref() {
                None => return 0,
                Some(Node::Leaf(numbers)) => return numbers[place(stream, 0)],
                Some(Node::Inner(children)) => node = &children[place(stream, height)],
            }
            height -= 1;
        }
    }

    /// Makes the number of a stream at least `n`.
    pub fn raise(&mut self, stream: u32, n: u64) {
        if self.get(stream) >= n {
            return;
        }
        while !self.reaches(stream) {
            self.heighten();
        }
        let (mut node, mut height) = (&mut self.root, self.height);
        loop {
            let empty =
                || Arc::new(if height == 0 { Node::Leaf([0; WIDTH]) } else { Node::Inner(Children::default()) });
            match Arc::make_mut(node.get_or_insert_with(empty)) {
                Node::Leaf(numbers) => {
                    numbers[place(stream, 0)] = n;
                    return;
                }
                Node::Inner(children) => node = &mut children[place(stream, height)],
            }
            height -= 1;
        }
    }

    /// Makes each number at least that of `other`.
    pub fn join(&mut self, other: &StreamMap) {
        let mut other = other.clone();
        while self.height < other.height {
            self.heighten();
        }
        while other.height < self.height {
            other.heighten();
        }
        join(&mut self.root, &other.root);
    }

    /// Removes leaves for all of whose streams `keep` is false. Others stay, so that copies go on
    /// sharing them.
    pub fn forget_unless(&mut self, mut keep: impl FnMut(u32, u64) -> bool) {
        forget(&mut self.root, self.height, 0, &mut keep);
    }

    /// The numbers that are not 0, by stream.
    pub fn entries(&self) -> Vec<(u32, u64)> {
        let mut entries = Vec::new();
        if let Some(root) = &self.root {
            root.visit(self.height, 0, &mut |stream, n| entries.push((stream, n)));
        }
        entries
    }

    /// Whether all numbers are 0.
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    fn reaches(&self, stream: u32) -> bool {
        u64::from(stream) >> (BITS * (self.height + 1)) == 0
    }

    /// Adds an inner node above all others.
    fn heighten(&mut self) {
        if let Some(root) = self.root.take() {
            let mut children = Children::default();
            children[0] = Some(root);
            self.root = Some(Arc::new(Node::Inner(children)));
        }
        self.height += 1;
    }
}

impl PartialEq for StreamMap {
    fn eq(&self, other: &StreamMap) -> bool {
        self.entries() == other.entries()
    }
}

impl Eq for StreamMap {}

impl fmt::Debug for StreamMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.entries()).finish()
    }
}

impl Node {
    /// Calls a function for each number that is not 0; `first` is the first stream of this node.
    fn visit(&self, height: u32, first: u32, with: &mut impl FnMut(u32, u64)) {
        match self {
            Node::Leaf(numbers) => {
                listed(first, numbers).for_each(|(stream, n)| with(stream, n));
            }
            Node::Inner(children) => {
                for (first, child) in firsts(first, height).zip(children) {
                    child.iter().for_each(|child| child.visit(height - 1, first, with));
                }
            }
        }
    }
}

/// The first streams of the children of an inner node.
fn firsts(first: u32, height: u32) -> impl Iterator<Item = u32> {
    (0..1 << BITS).map(move |child: u32| first | child << (BITS * height))
}

/// The numbers of a leaf that are not 0, by stream.
fn listed(first: u32, numbers: &[u64; WIDTH]) -> impl Iterator<Item = (u32, u64)> {
    (0..).zip(numbers).filter(|&(_, &n)| n > 0).map(move |(place, &n)| (first | place, n))
}

/// The place of a stream's number in a leaf, or of the child that it is in.
fn place(stream: u32, height: u32) -> usize {
    (stream >> (BITS * height)) as usize % WIDTH
}

fn join(mine: &mut Option<Arc<Node>>, theirs: &Option<Arc<Node>>) {
    let Some(theirs) = theirs else { return };
    let Some(own) = mine else {
        *mine = Some(theirs.clone());
        return;
    };
    if Arc::ptr_eq(own, theirs) {
        return;
    }
    match (&**own, &**theirs) {
        (Node::Leaf(numbers), Node::Leaf(others)) => {
            if numbers.iter().zip(others).all(|(n, other)| n >= other) {
                return;
            }
            if numbers.iter().zip(others).all(|(n, other)| n <= other) {
                *own = theirs.clone();
            } else if let Node::Leaf(numbers) = Arc::make_mut(own) {
                numbers.iter_mut().zip(others).for_each(|(n, other)| *n = (*n).max(*other));
            }
        }
        (Node::Inner(_), Node::Inner(others)) => {
            // In place, unless another tree shares this node.
            let mut copied = None;
            let joined = match Arc::get_mut(own) {
                Some(Node::Inner(children)) => children,
                _ => match &**own {
                    Node::Inner(children) => copied.insert(children.clone()),
                    Node::Leaf(_) => return,
                },
            };
            joined.iter_mut().zip(others).for_each(|(child, other)| join(child, other));
            if are_same(joined, others) {
                *own = theirs.clone();
            } else if let Some(copied) = copied
                && !matches!(&**own, Node::Inner(children) if are_same(children, &copied))
            {
                *own = Arc::new(Node::Inner(copied));
            }
        }
        // Both are of one height.
        _ => {}
    }
}

/// True if two nodes have the very same children.
fn are_same(children: &Children, others: &Children) -> bool {
    children.iter().zip(others).all(|(child, other)| match (child, other) {
        (Some(child), Some(other)) => Arc::ptr_eq(child, other),
        (None, None) => true,
        _ => false,
    })
}

fn forget(node: &mut Option<Arc<Node>>, height: u32, first: u32, keep: &mut impl FnMut(u32, u64) -> bool) {
    let Some(own) = node else { return };
    let is_over = match &**own {
        Node::Leaf(numbers) => !listed(first, numbers).any(|(stream, n)| keep(stream, n)),
        Node::Inner(children) => {
            let mut left = children.clone();
            firsts(first, height).zip(&mut left).for_each(|(first, child)| forget(child, height - 1, first, keep));
            if !are_same(children, &left) {
                *own = Arc::new(Node::Inner(left));
            }
            matches!(&**own, Node::Inner(children) if children.iter().all(Option::is_none))
        }
    };
    if is_over {
        *node = None;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Raise(usize, u32, u64),
        Join(usize, usize),
        Copy(usize, usize),
        /// Forgets streams below a number that have values below another.
        Forget(usize, u32, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let which = || 0..4_usize;
        let stream = || prop_oneof![0..40_u32, 0..5000_u32, Just(u32::MAX), any::<u32>()];
        prop_oneof![
            4 => (which(), stream(), 0..20_u64).prop_map(|(map, stream, n)| Step::Raise(map, stream, n)),
            2 => (which(), which()).prop_map(|(map, other)| Step::Join(map, other)),
            1 => (which(), which()).prop_map(|(map, other)| Step::Copy(map, other)),
            1 => (which(), stream(), 0..20_u64).prop_map(|(map, below, n)| Step::Forget(map, below, n)),
        ]
    }

    proptest! {
        #[test]
        fn behaves_like_dense_vectors(steps in prop::collection::vec(step(), 0..80)) {
            let mut maps: [StreamMap; 4] = Default::default();
            let mut dense: [BTreeMap<u32, u64>; 4] = Default::default();
            for step in steps {
                match step {
                    Step::Raise(map, stream, n) => {
                        maps[map].raise(stream, n);
                        if n > 0 {
                            let entry = dense[map].entry(stream).or_default();
                            *entry = n.max(*entry);
                        }
                    }
                    Step::Join(map, other) => {
                        let (taken, values) = (maps[other].clone(), dense[other].clone());
                        maps[map].join(&taken);
                        for (stream, n) in values {
                            let entry = dense[map].entry(stream).or_default();
                            *entry = n.max(*entry);
                        }
                    }
                    Step::Copy(map, other) => (maps[map], dense[map]) = (maps[other].clone(), dense[other].clone()),
                    Step::Forget(map, below, most) => {
                        maps[map].forget_unless(|stream, n| stream >= below || n >= most);
                        let leaf = |stream: u32| stream >> BITS;
                        let kept = dense[map].iter().filter(|&(&stream, &n)| stream >= below || n >= most);
                        let kept: HashSet<u32> = kept.map(|(&stream, _)| leaf(stream)).collect();
                        dense[map].retain(|&stream, _| kept.contains(&leaf(stream)));
                    }
                }
                for (map, dense) in maps.iter().zip(&dense) {
                    prop_assert_eq!(map.entries(), dense.iter().map(|(&stream, &n)| (stream, n)).collect::<Vec<_>>());
                    prop_assert!(dense.iter().all(|(&stream, &n)| map.get(stream) == n));
                    prop_assert_eq!(map.get(77), dense.get(&77).copied().unwrap_or(0));
                }
            }
            prop_assert_eq!(maps[0] == maps[1], dense[0] == dense[1]);
        }
    }

    fn nodes(node: &Arc<Node>, seen: &mut HashSet<*const Node>) {
        if seen.insert(Arc::as_ptr(node))
            && let Node::Inner(children) = &**node
        {
            children.iter().flatten().for_each(|child| nodes(child, seen));
        }
    }

    /// Each stream waits for the one before it, round after round, and its clock is copied then, as
    /// into an event.
    #[test]
    fn clocks_that_are_passed_around_share_their_nodes() {
        let streams = 1000_u32;
        let mut clocks = vec![StreamMap::default(); streams as usize];
        for round in 1..=3 {
            for stream in 0..streams {
                let before = clocks[((stream + streams - 1) % streams) as usize].clone();
                let clock = &mut clocks[stream as usize];
                clock.join(&before);
                clock.raise(stream, round);
            }
        }
        let last = clocks.last().unwrap();
        assert!((0..streams).all(|stream| last.get(stream) == 3));
        assert!((0..streams).all(|stream| clocks[0].get(stream) == if stream == 0 { 3 } else { 2 }));
        let mut seen = HashSet::new();
        clocks.iter().filter_map(|clock| clock.root.as_ref()).for_each(|root| nodes(root, &mut seen));
        assert!(seen.len() < 5 * streams as usize, "{} nodes", seen.len());
    }
}
