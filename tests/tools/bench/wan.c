/* A wide-area network on one machine, for kernels without netem.
 *
 *     wan N [name=wan] [net=10.77.0] [seed=1] [KEY=VALUE ...]
 *
 * makes the network namespaces wan1..wanN, each with one interface `w0` at 10.77.0.i/24, and carries the IPv4
 * packets between them. Once they are up it prints "ready". Then it reads commands, one a line, and answers each
 * with one line:
 *
 *     set I KEY=VALUE ...    change node I
 *     cut I, heal I          lose all that node I sends and gets; stop to
 *     pair I J KEY=VALUE ... change what node I sends to node J, and only that
 *     stat                   counters as JSON
 *     quit                   remove the namespaces; so do the end of the input, SIGTERM and SIGINT
 *
 *     up, down    Mbit/s of the node's link, bytes of IP headers included; 0 is no limit
 *     delay       ms one way; between two nodes, the mean of theirs
 *     jitter      ms, the most that is added at random to a packet that the node sends; packets keep their order
 *     loss        percent of the TCP segments that the node sends
 *     queue       ms that a segment may wait for a link, up or down; what would wait longer is dropped
 *     region      a number; all are in region 0 unless told
 *     far         ms one way, on top of the delay, of what the node sends to other regions
 *     between     Mbit/s of the link that all nodes of its region share for what they send to other regions
 *
 * and of a pair, beside what its nodes have:
 *
 *     rate        Mbit/s; 0 is no limit
 *     loss        percent of the TCP segments
 *     spoil       percent of the TCP segments in which a byte is changed, so that no checksum tells
 *     cut         1: nothing gets through
 *
 * A packet's way:  read from the sender's TUN, wait for the up link, then for the region's if it leaves that, delay,
 * wait for the down link, write.
 *
 * The kernel hands over bursts: up to 64 KiB of TCP segments behind one header, which makes 1 Gbit/s cheap. A
 * burst is carried whole, but the links see its segments, each with its headers: loss and full queues hit single
 * segments (the rest goes on as smaller bursts), and the down link starts with the first segment, not the last.
 * The reader gets a burst when its last segment is there, and what came of one connection in the same TICK as one
 * burst: a network card's interrupt moderation. TICK is taken off the delay that it adds: the mean is right.
 *
 * Which segments are lost depends on the seed and on how many the node sent before, not on the time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_NODES 250
#define READS 64       /* packets taken from one node before the others get their turn */
#define TX_QUEUE 10000 /* packets that wait in a TUN while this process does not run */
#define TICK 500000    /* ns; each wake-up costs as much as many packets */
#define IDLE 100       /* ms; a signal that comes just before the wait is seen after it */
#define READY 64       /* bursts for one node that wait for the end of a tick */
#define BURST 60000    /* bytes of the largest burst that is put together */
#define TUN_FEATURES (IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
#define VNET ((int)sizeof(struct virtio_net_hdr))
#define SECOND 1000000000ll

enum { IP_LENGTH = 2, IP_ID = 4, IP_FRAGMENT = 6, IP_PROTOCOL = 9, IP_SUM = 10, IP_FROM = 12, IP_TO = 16 };
enum { TCP_SEQ = 4, TCP_ACK = 8, TCP_OFFSET = 12, TCP_FLAGS = 13, TCP_SUM = 16 };
enum { FIN = 0x01, PSH = 0x08, ACK = 0x10, CWR = 0x80 };

typedef struct {
    double up, down, delay, jitter, loss, queue, region, far, between;
} Shape;

typedef struct {
    double rate, loss, spoil, cut;
    int64_t free; /* ns, when it has sent all that it took */
} Pair;

typedef struct {
    uint64_t tx, rx;              /* bytes on the wire that entered the network, and that were delivered */
    uint64_t lost, dropped, severed; /* segments: at random, by a full queue, by a cut */
} Counters;

typedef struct { /* one packet of the kernel: one segment, or several of `mss` bytes behind one header */
    unsigned char *data; /* the virtio header, then the IP packet; owned */
    int length;
    int head;          /* bytes of the IP and TCP headers; of the IP header if it is not TCP */
    int mss, segments; /* mss is 0 if it is not TCP, or has no payload */
} Burst;

typedef struct {
    Shape shape;
    bool cut;
    int tun;
    int64_t up_free, down_free;     /* ns, when the link has sent all that it took */
    int64_t arrival[MAX_NODES + 1]; /* ns, of the last packet to each node: jitter does not reorder */
    uint64_t random;
    int64_t until_loss; /* segments that get through before the next that does not */
    Burst ready[READY]; /* arrived in this tick, in order */
    int readies;
    Counters count;
} Node;

typedef struct {
    int64_t at, order; /* ns; equal times keep their order */
    int from, to;
    bool arrived; /* it waits for its delivery, not for its arrival at the down link */
    int64_t span; /* ns between its first segment's arrival and its last one's */
    Burst burst;
} Event;

static Node node[MAX_NODES + 1];
static Pair pairs[MAX_NODES + 1][MAX_NODES + 1]; /* from, to */
static int nodes, made;
static char name[16] = "wan", net[16] = "10.77.0";
static Event *heap;
static int heap_size, heap_room;
static int64_t shared_free[MAX_NODES + 1]; /* ns, of the links between the regions, when they have sent all */
static int64_t events;
static int64_t late_max, late_sum, deliveries; /* ns: how far this process lags behind the network that it plays */
static volatile sig_atomic_t stop;

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- events, in the order of their time ---- */

static bool before(const Event *a, const Event *b) {
    return a->at < b->at || (a->at == b->at && a->order < b->order);
}

static void schedule(Event event) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 4096;
        if (!(heap = realloc(heap, heap_room * sizeof *heap))) abort();
    }
    event.order = events++;
    int hole = heap_size++;
    for (int parent; hole && before(&event, &heap[parent = (hole - 1) / 2]); hole = parent)
        heap[hole] = heap[parent];
    heap[hole] = event;
}

static Event next_event(void) {
    Event first = heap[0], last = heap[--heap_size];
    int hole = 0;
    for (int child; (child = 2 * hole + 1) < heap_size; hole = child) {
        if (child + 1 < heap_size && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[hole] = heap[child];
    }
    heap[hole] = last;
    return first;
}

/* ---- chance ---- */

static double uniform(Node *n) { /* in (0, 1]; splitmix64 */
    uint64_t z = n->random += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return ((z ^ z >> 31) >> 11) * 0x1p-53 + 0x1p-54;
}

static void draw_loss(Node *n) { /* one draw for each loss, not for each segment: the gaps are geometric */
    double p = n->shape.loss / 100;
    n->until_loss = p <= 0 ? INT64_MAX : p >= 1 ? 0 : (int64_t)fmin(log(uniform(n)) / log1p(-p), 1e18);
}

static bool loses_next(Node *n) {
    if (n->until_loss-- > 0) return false;
    draw_loss(n);
    return true;
}

/* ---- bursts ---- */

static int get16(const unsigned char *p) { return p[0] << 8 | p[1]; }
static void put16(unsigned char *p, unsigned v) { p[0] = v >> 8, p[1] = v; }
static uint32_t get32(const unsigned char *p) { return (uint32_t)get16(p) << 16 | get16(p + 2); }
static void put32(unsigned char *p, uint32_t v) { put16(p, v >> 16), put16(p + 2, v & 0xffff); }

static uint32_t sum16(const unsigned char *p, int length, uint32_t sum) {
    for (int i = 0; i < length; i += 2) sum += get16(p + i);
    return sum;
}

static unsigned fold(uint32_t sum) {
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return sum;
}

static int payload(const Burst *b) { return b->length - VNET - b->head; }

/* Bytes on the wire of the first `segments` segments: each of them carries its own headers. */
static int64_t wire(const Burst *b, int segments) {
    return segments * b->head + (segments < b->segments ? segments * b->mss : payload(b));
}

/* What is in these bytes; false if it is not an IPv4 packet. */
static bool parse(unsigned char *data, int length, Burst *b) {
    const struct virtio_net_hdr *h = (void *)data;
    const unsigned char *ip = data + VNET;
    if (length < VNET + 20 || ip[0] >> 4 != 4) return false;
    *b = (Burst){data, length, (ip[0] & 15) * 4, 0, 1};
    bool whole = !(get16(ip + IP_FRAGMENT) & 0x3fff) && payload(b) >= 20;
    if (ip[IP_PROTOCOL] != IPPROTO_TCP || !whole) return b->head >= 20 && payload(b) >= 0;
    b->head += (ip[b->head + TCP_OFFSET] >> 4) * 4;
    b->mss = h->gso_type == VIRTIO_NET_HDR_GSO_NONE ? payload(b) : h->gso_size;
    if (b->mss > 0) b->segments = (payload(b) + b->mss - 1) / b->mss;
    return payload(b) >= 0;
}

static unsigned char *ip_of(const Burst *b) { return b->data + VNET; }
static unsigned char *tcp_of(const Burst *b) { return ip_of(b) + (*ip_of(b) & 15) * 4; }

/* Make the headers say what the TCP burst is now. */
static void fix_headers(Burst *b) {
    struct virtio_net_hdr *h = (void *)b->data;
    unsigned char *ip = ip_of(b), *tcp = tcp_of(b);
    h->gso_type = b->segments > 1 ? VIRTIO_NET_HDR_GSO_TCPV4 : VIRTIO_NET_HDR_GSO_NONE;
    h->gso_size = b->segments > 1 ? b->mss : 0;
    h->hdr_len = b->head;
    put16(ip + IP_LENGTH, b->length - VNET);
    put16(ip + IP_SUM, 0);
    put16(ip + IP_SUM, ~fold(sum16(ip, tcp - ip, 0)));
    /* What a kernel leaves to its network card: the sum of the addresses and the length, without the bytes. */
    put16(tcp + TCP_SUM, fold(sum16(ip + IP_FROM, 8, IPPROTO_TCP + (ip + b->length - VNET - tcp))));
}

/* The segments [first, last) of a burst as a burst of their own; of all of them a plain copy, of any protocol. */
static Burst slice(const Burst *b, int first, int last) {
    int from = first * b->mss, bytes = (last < b->segments ? last * b->mss : payload(b)) - from;
    bool all = !first && last == b->segments;
    Burst part = {malloc(VNET + b->head + bytes), VNET + b->head + bytes, b->head, b->mss, last - first};
    if (!part.data) abort();
    memcpy(part.data, b->data, VNET + b->head);
    memcpy(part.data + VNET + b->head, b->data + VNET + b->head + from, bytes);
    if (all) return part;

    unsigned char *ip = ip_of(&part), *tcp = tcp_of(&part);
    put16(ip + IP_ID, get16(ip + IP_ID) + first);
    put32(tcp + TCP_SEQ, get32(tcp + TCP_SEQ) + from);
    if (last < b->segments) tcp[TCP_FLAGS] &= ~(FIN | PSH);
    if (first > 0) tcp[TCP_FLAGS] &= ~CWR;
    fix_headers(&part);
    return part;
}

static bool is_tcp(const Burst *b) { return b->head > (*ip_of(b) & 15) * 4; }

static bool same_connection(const Burst *a, const Burst *b) {
    return is_tcp(a) && is_tcp(b) && !memcmp(ip_of(a) + IP_FROM, ip_of(b) + IP_FROM, 8) &&
           !memcmp(tcp_of(a), tcp_of(b), 4);
}

/* Append `b`, of the same connection, to `a` if it goes on where `a` ends; false if it does not. */
static bool merge(Burst *a, const Burst *b) {
    const struct virtio_net_hdr *ha = (void *)a->data, *hb = (void *)b->data;
    unsigned char *ta = tcp_of(a), *tb = tcp_of(b);
    bool plain = (ta[TCP_FLAGS] | PSH) == (ACK | PSH) && (tb[TCP_FLAGS] | PSH) == (ACK | PSH) &&
                 ha->flags & hb->flags & VIRTIO_NET_HDR_F_NEEDS_CSUM && ip_of(a)[1] == ip_of(b)[1];
    bool fits = a->mss && b->mss && a->head == b->head && payload(a) == a->segments * a->mss &&
                (b->segments > 1 ? b->mss == a->mss : b->mss <= a->mss) && a->length + payload(b) <= BURST;
    if (!plain || !fits || get32(ta + TCP_SEQ) + payload(a) != get32(tb + TCP_SEQ)) return false;

    if (!(a->data = realloc(a->data, a->length + payload(b)))) abort();
    memcpy(a->data + a->length, b->data + VNET + b->head, payload(b));
    memcpy(tcp_of(a) + TCP_ACK, tb + TCP_ACK, a->head - (tb - ip_of(b)) - TCP_ACK); /* acknowledgement, options */
    a->length += payload(b);
    a->segments += b->segments;
    fix_headers(a);
    return true;
}

/* ---- the network ---- */

static double ns_per_byte(double mbit) { return mbit > 0 ? 8000 / mbit : 0; }

/* How many segments of a burst find room in a queue that takes `waits` ns to drain. */
static int fitting(const Burst *b, int64_t waits, double queue, double byte_ns) {
    double room = queue * 1e6 - waits, each = wire(b, 1) * byte_ns;
    if (room < 0) return 0;
    return each > 0 && room / each + 1 < b->segments ? (int)(room / each) + 1 : b->segments;
}

/* Node of an address in our network, 0 if there is none. */
static int node_at(const unsigned char *address) {
    char text[INET_ADDRSTRLEN];
    size_t prefix = strlen(net);
    inet_ntop(AF_INET, address, text, sizeof text);
    return !strncmp(text, net, prefix) && text[prefix] == '.' && address[3] <= nodes ? address[3] : 0;
}

static bool leaves_region(int from, int to) { return node[from].shape.region != node[to].shape.region; }

/* Change a byte in so many percent of a burst's segments. The kernel leaves checksums to its network card, which this
 * is: what is changed here nobody notices below TLS, or whoever the bytes are for. */
static void spoil(Burst *b, Node *sender, double percent) {
    if (percent <= 0 || !is_tcp(b) || payload(b) <= 0) return;
    for (int s = 0; s < b->segments; s++)
        if (100 * uniform(sender) <= percent) {
            int from = s * b->mss, bytes = s + 1 < b->segments ? b->mss : payload(b) - from;
            b->data[VNET + b->head + from + (int)(uniform(sender) * (bytes - 1))] ^= 0x20;
        }
}

/* Put the segments [first, last) of a burst, which its link starts to send at `start`, on their way. */
static void launch(int from, int to, const Burst *b, int first, int last, int64_t start, double byte_ns) {
    Node *sender = &node[from];
    int64_t first_out = start + wire(b, first + 1) * byte_ns, last_out = start + wire(b, last) * byte_ns;
    int64_t delay = later((sender->shape.delay + node[to].shape.delay) / 2 * 1e6 - TICK, 0);
    if (leaves_region(from, to)) delay += sender->shape.far * 1e6;
    if (sender->shape.jitter > 0) delay += uniform(sender) * sender->shape.jitter * 1e6;
    int64_t at = sender->arrival[to] = later(first_out + delay, sender->arrival[to]);
    Burst part = slice(b, first, last);
    spoil(&part, sender, pairs[from][to].spoil);
    schedule((Event){at, 0, from, to, false, last_out - first_out, part});
}

/* A burst comes out of a node. The caller keeps its bytes. */
static void leave(int from, const Burst *b, int64_t now) {
    Node *sender = &node[from];
    int to = node_at(b->data + VNET + IP_TO);
    if (!to) return;
    Pair *pair = &pairs[from][to];
    if (sender->cut || node[to].cut || pair->cut) {
        sender->count.severed += b->segments;
        return;
    }
    double up_ns = ns_per_byte(sender->shape.up), byte_ns = up_ns;
    int64_t up_start = later(now, sender->up_free), start = up_start, *shared = NULL;
    if (sender->shape.between > 0 && leaves_region(from, to)) {
        shared = &shared_free[(int)sender->shape.region];
        start = later(start, *shared);
        byte_ns = fmax(byte_ns, ns_per_byte(sender->shape.between));
    }
    if (pair->rate > 0) {
        start = later(start, pair->free);
        byte_ns = fmax(byte_ns, ns_per_byte(pair->rate));
    }
    int taken = fitting(b, start - now, sender->shape.queue, byte_ns), first = 0;
    sender->count.dropped += b->segments - taken;
    if (!taken) return;
    sender->count.tx += wire(b, taken);
    sender->up_free = up_start + wire(b, taken) * up_ns;
    if (shared) *shared = start + wire(b, taken) * ns_per_byte(sender->shape.between);
    if (pair->rate > 0) pair->free = start + wire(b, taken) * ns_per_byte(pair->rate);
    for (int s = 0; s < taken; s++)
        if (loses_next(sender) || (pair->loss > 0 && 100 * uniform(sender) <= pair->loss)) {
            sender->count.lost++;
            if (s > first) launch(from, to, b, first, s, start, byte_ns);
            first = s + 1;
        }
    if (taken > first) launch(from, to, b, first, taken, start, byte_ns);
}

/* A burst's first segment is at the receiver's down link. */
static void arrive(Event event) {
    Node *receiver = &node[event.to];
    Burst whole = event.burst;
    if (receiver->cut || node[event.from].cut || pairs[event.from][event.to].cut) {
        node[event.from].count.severed += whole.segments;
        free(whole.data);
        return;
    }
    double byte_ns = ns_per_byte(receiver->shape.down);
    int64_t start = later(event.at, receiver->down_free);
    int taken = fitting(&whole, start - event.at, receiver->shape.queue, byte_ns);
    receiver->count.dropped += whole.segments - taken;
    if (taken < whole.segments) {
        if (taken) event.burst = slice(&whole, 0, taken);
        free(whole.data);
    }
    if (!taken) return;
    int64_t bytes = wire(&event.burst, taken), tail = bytes - wire(&event.burst, taken - 1);
    event.at = later(start + bytes * byte_ns, event.at + event.span + tail * byte_ns);
    event.arrived = true;
    receiver->down_free = event.at;
    schedule(event);
}

static void hand_over(Node *receiver) {
    for (int i = 0; i < receiver->readies; i++) {
        Burst *b = &receiver->ready[i];
        if (write(receiver->tun, b->data, b->length) != b->length) receiver->count.dropped += b->segments;
        free(b->data);
    }
    receiver->readies = 0;
}

/* A burst is at its receiver: join it to what came before it on its connection, or queue it. */
static void deliver(Event event, int64_t now) {
    Node *receiver = &node[event.to];
    late_max = later(late_max, now - event.at);
    late_sum += now - event.at;
    deliveries++;
    receiver->count.rx += wire(&event.burst, event.burst.segments);
    for (int i = receiver->readies - 1; i >= 0; i--)
        if (same_connection(&receiver->ready[i], &event.burst)) {
            if (!merge(&receiver->ready[i], &event.burst)) break;
            free(event.burst.data);
            return;
        }
    if (receiver->readies == READY) hand_over(receiver);
    receiver->ready[receiver->readies++] = event.burst;
}

/* Do what is due. */
static void advance(void) {
    int64_t now = clock_ns();
    while (heap_size && heap[0].at <= now) {
        Event event = next_event();
        event.arrived ? deliver(event, now) : arrive(event);
    }
    for (int i = 1; i <= nodes; i++) hand_over(&node[i]);
}

static void take(int from) {
    static unsigned char data[1 << 17];
    Burst burst;
    for (int i = 0; i < READS; i++) {
        int length = read(node[from].tun, data, sizeof data);
        if (length <= 0) return;
        if (parse(data, length, &burst)) leave(from, &burst, clock_ns());
    }
}

/* ---- namespaces ---- */

static void clean_up(void) {
    for (; made; made--) {
        char space[24];
        snprintf(space, sizeof space, "%s%d", name, made);
        char *command[] = {"ip", "netns", "del", space, NULL};
        pid_t pid;
        if (!posix_spawnp(&pid, command[0], NULL, NULL, command, environ)) waitpid(pid, NULL, 0);
    }
}

static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "wan: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    exit(1); /* cleans up */
}

static void must(int result, const char *what) {
    if (result < 0) die("%s: %s", what, strerror(errno));
}

static void add_namespace(const char *space) {
    char path[64];
    snprintf(path, sizeof path, "/run/netns/%s", space);
    if (!access(path, F_OK))
        die("the network namespace %s exists; if no emulator runs, remove it: ip netns del %s", space, space);
    char *command[] = {"ip", "netns", "add", (char *)space, NULL};
    pid_t pid;
    int status;
    if (posix_spawnp(&pid, command[0], NULL, NULL, command, environ)) die("there is no `ip`: install iproute2");
    if (waitpid(pid, &status, 0) < 0 || status) die("cannot make network namespaces: run as root");
    made++;
}

static void bring_up(int socket, const char *device) {
    struct ifreq r = {0};
    strcpy(r.ifr_name, device);
    must(ioctl(socket, SIOCGIFFLAGS, &r), device);
    r.ifr_flags |= IFF_UP | IFF_RUNNING;
    must(ioctl(socket, SIOCSIFFLAGS, &r), device);
}

/* Make node i's namespace and its interface: the TUN is born inside, so that nothing is ever visible outside. */
static void make_node(int i, int home) {
    char space[24], path[64], address[INET_ADDRSTRLEN + 8];
    snprintf(space, sizeof space, "%s%d", name, i);
    snprintf(path, sizeof path, "/run/netns/%s", space);
    snprintf(address, sizeof address, "%s.%d", net, i);
    add_namespace(space);
    int inside = open(path, O_RDONLY | O_CLOEXEC);
    must(inside, path);
    must(setns(inside, CLONE_NEWNET), "setns");
    close(inside);

    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    must(tun, "/dev/net/tun");
    struct ifreq r = {.ifr_name = "w0", .ifr_flags = TUN_FEATURES};
    must(ioctl(tun, TUNSETIFF, &r), "TUNSETIFF");
    must(ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4), "TUNSETOFFLOAD");

    int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    must(s, "socket");
    r = (struct ifreq){.ifr_name = "w0", .ifr_qlen = TX_QUEUE};
    must(ioctl(s, SIOCSIFTXQLEN, &r), "SIOCSIFTXQLEN");
    struct sockaddr_in in = {.sin_family = AF_INET};
    if (inet_pton(AF_INET, address, &in.sin_addr) != 1) die("net=%s is not like 10.77.0", net);
    r = (struct ifreq){.ifr_name = "w0"};
    memcpy(&r.ifr_addr, &in, sizeof in);
    must(ioctl(s, SIOCSIFADDR, &r), "SIOCSIFADDR");
    in.sin_addr.s_addr = htonl(0xffffff00);
    memcpy(&r.ifr_netmask, &in, sizeof in);
    must(ioctl(s, SIOCSIFNETMASK, &r), "SIOCSIFNETMASK");
    bring_up(s, "lo");
    bring_up(s, "w0");
    close(s);
    must(setns(home, CLONE_NEWNET), "setns");
    node[i].tun = tun;
}

/* ---- control ---- */

typedef struct {
    const char *key;
    double *value;
} Key;

/* Apply `KEY=VALUE` to one of these; false if it is not one. */
static bool apply(const Key *keys, size_t count, const char *text) {
    const char *equals = strchr(text, '=');
    if (!equals) return false;
    char *end;
    double value = strtod(equals + 1, &end);
    if (end == equals + 1 || *end || !isfinite(value) || value < 0) return false;
    if (!strncmp(text, "region=", 7) && value > MAX_NODES) return false;
    for (size_t k = 0; k < count; k++)
        if (strlen(keys[k].key) == (size_t)(equals - text) && !strncmp(text, keys[k].key, equals - text)) {
            *keys[k].value = value;
            return true;
        }
    return false;
}

static bool set_key(Shape *shape, const char *text) {
    Key keys[] = {{"up", &shape->up},         {"down", &shape->down}, {"delay", &shape->delay},
                  {"jitter", &shape->jitter}, {"loss", &shape->loss}, {"queue", &shape->queue},
                  {"far", &shape->far},       {"region", &shape->region}, {"between", &shape->between}};
    return apply(keys, sizeof keys / sizeof *keys, text);
}

static bool set_pair_key(Pair *pair, const char *text) {
    Key keys[] = {{"rate", &pair->rate}, {"loss", &pair->loss}, {"spoil", &pair->spoil}, {"cut", &pair->cut}};
    return apply(keys, sizeof keys / sizeof *keys, text);
}

static void print_counters(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = usage.ru_utime.tv_sec + usage.ru_utime.tv_usec / 1e6;
    cpu += usage.ru_stime.tv_sec + usage.ru_stime.tv_usec / 1e6;
    printf("{\"cpu_s\":%.6f,\"late_max_ms\":%.3f,\"late_mean_ms\":%.3f,\"nodes\":[", cpu, late_max / 1e6,
           deliveries ? late_sum / 1e6 / deliveries : 0);
    for (int i = 1; i <= nodes; i++) {
        Counters *c = &node[i].count;
        printf("%s{\"tx\":%llu,\"rx\":%llu,\"lost\":%llu,\"dropped\":%llu,\"severed\":%llu}", i > 1 ? "," : "",
               (unsigned long long)c->tx, (unsigned long long)c->rx, (unsigned long long)c->lost,
               (unsigned long long)c->dropped, (unsigned long long)c->severed);
    }
    printf("]}\n");
}

static void obey(char *line) {
    char *rest, *verb = strtok_r(line, " \t\r", &rest), *word = verb ? strtok_r(NULL, " \t\r", &rest) : NULL;
    int i = word ? atoi(word) : 0;
    if (!verb) return;
    if (!strcmp(verb, "quit")) {
        stop = 1;
        printf("ok\n");
    } else if (!strcmp(verb, "stat")) {
        print_counters();
    } else if (i < 1 || i > nodes) {
        printf("error: %s needs a node from 1 to %d\n", verb, nodes);
    } else if (!strcmp(verb, "cut") || !strcmp(verb, "heal")) {
        node[i].cut = *verb == 'c';
        printf("ok\n");
    } else if (!strcmp(verb, "pair")) {
        int j = (word = strtok_r(NULL, " \t\r", &rest)) ? atoi(word) : 0;
        if (j < 1 || j > nodes || j == i) {
            printf("error: pair needs two nodes from 1 to %d\n", nodes);
            return;
        }
        Pair pair = pairs[i][j];
        while ((word = strtok_r(NULL, " \t\r", &rest)) && set_pair_key(&pair, word)) continue;
        if (word) {
            printf("error: %s is not a key and its value\n", word);
        } else {
            pairs[i][j] = pair;
            printf("ok\n");
        }
    } else if (!strcmp(verb, "set")) {
        Shape shape = node[i].shape;
        while ((word = strtok_r(NULL, " \t\r", &rest)) && set_key(&shape, word)) continue;
        if (word) {
            printf("error: %s is not a key and its value\n", word);
        } else {
            node[i].shape = shape;
            draw_loss(&node[i]);
            printf("ok\n");
        }
    } else {
        printf("error: there is no command %s\n", verb);
    }
}

/* Obey the lines that are there. */
static void listen_to(int input) {
    static char text[4096];
    static size_t held;
    ssize_t got = read(input, text + held, sizeof text - held);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) stop = 1;
    if (got <= 0) return;
    held += got;
    char *line = text;
    for (char *end; (end = memchr(line, '\n', text + held - line)); line = end + 1) {
        *end = 0;
        obey(line);
    }
    held -= line - text;
    memmove(text, line, held);
    if (held == sizeof text) held = 0; /* no command is that long */
    fflush(stdout);
}

static void on_signal(int signal) { stop = signal; }

/* Called late, the network would be slower than it should be: this process goes before the others. */
static void hurry(void) {
    struct sched_param first = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &first)) setpriority(PRIO_PROCESS, 0, -15);
    prctl(PR_SET_TIMERSLACK, 1000);
}

static bool copy(char *to, const char *from, size_t room) {
    return strlen(from) < room && strcpy(to, from);
}

static void configure(int words, char **word) {
    Shape shape = {.queue = 200};
    uint64_t seed = 1;
    if (words < 2 || (nodes = atoi(word[1])) < 1 || nodes > MAX_NODES) die("how many nodes? 1 to %d", MAX_NODES);
    for (int k = 2; k < words; k++) {
        bool ok = true;
        char *value = strchr(word[k], '=');
        if (value && !strncmp(word[k], "seed=", 5)) seed = strtoull(value + 1, NULL, 10);
        else if (value && !strncmp(word[k], "name=", 5)) ok = copy(name, value + 1, sizeof name);
        else if (value && !strncmp(word[k], "net=", 4)) ok = copy(net, value + 1, sizeof net);
        else ok = set_key(&shape, word[k]);
        if (!ok) die("%s is not a key and its value", word[k]);
    }
    for (char *c = name; *c; c++)
        if (!isalnum((unsigned char)*c) && *c != '-') die("name=%s: letters, digits and hyphens", name);
    for (int i = 1; i <= nodes; i++) {
        node[i].shape = shape;
        node[i].random = seed * 1000003 + i;
        draw_loss(&node[i]);
    }
}

int main(int words, char **word) {
    configure(words, word);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    signal(SIGPIPE, SIG_IGN);
    atexit(clean_up);

    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    must(home, "/proc/self/ns/net");
    struct pollfd polled[MAX_NODES + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    for (int i = 1; i <= nodes; i++) {
        make_node(i, home);
        polled[i] = (struct pollfd){.fd = node[i].tun, .events = POLLIN};
    }
    hurry();
    printf("ready\n");
    fflush(stdout);

    while (!stop) {
        advance();
        if (heap_size) { /* asleep, not waiting for packets: that saves their senders the wake-ups */
            int64_t next = (clock_ns() / TICK + 1) * TICK;
            struct timespec at = {next / SECOND, next % SECOND};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
        }
        if (poll(polled, nodes + 1, heap_size ? 0 : IDLE) <= 0) continue;
        if (polled[0].revents) listen_to(STDIN_FILENO);
        for (int i = 1; i <= nodes; i++)
            if (polled[i].revents) take(i);
    }
    return 0;
}
