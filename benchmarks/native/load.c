/* Closed-loop load: CONNECTIONS clients, each with one request under way, REQUESTS in all.
 *
 * load PORT CONNECTIONS REQUESTS BODY_BYTES DEADLINE_S < REQUEST
 *
 * REQUEST is sent as it is, but for the first "%SESSION%" in it, which becomes one of 64 nine-letter session ids. Every
 * answer must be a 200 of BODY_BYTES payload bytes, with Content-Length or chunked; anything else counts as an error,
 * and its connection is opened anew. Prints one line of JSON: seconds, requests, errors, p50_us, p99_us, status (of the
 * last error; 0: a transfer that broke or was too short or long).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_REQUEST = 1 << 20, SESSIONS = 64, BUFFER = 1 << 18, MAX_HEAD = 4096 };
enum state { IN_HEAD, IN_LENGTH, IN_SIZE, IN_CHUNK, IN_CHUNK_END, IN_LAST, DONE, BAD };

struct client {
    int fd, status;
    enum state state;
    size_t sent, payload, left, have;
    double began;
    char head[MAX_HEAD]; /* of the answer, or a chunk's size line */
};

static char request[MAX_REQUEST];
static size_t request_size;
static char *session;
static int epoll, last_status;
static long to_send, answered, errors;
static float *latencies;
static struct sockaddr_in address;
static size_t expected;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void send_request(struct client *c) {
    while (c->sent < request_size) {
        ssize_t sent = send(c->fd, request + c->sent, request_size - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0)
            break; /* EAGAIN: an event will say; gone: the read will say */
        c->sent += (size_t)sent;
    }
    struct epoll_event event = {.events = EPOLLIN | (c->sent < request_size ? EPOLLOUT : 0), .data.ptr = c};
    static char waiting[1 << 16];
    if ((c->sent < request_size) != waiting[c->fd]) {
        waiting[c->fd] = c->sent < request_size;
        epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event);
    }
}

static void begin(struct client *c) {
    static unsigned turn;
    c->state = DONE;
    if (to_send <= 0)
        return;
    to_send--;
    if (session) {
        char id[10];
        snprintf(id, sizeof id, "session%02u", turn++ % SESSIONS);
        memcpy(session, id, 9);
    }
    c->sent = c->payload = c->have = 0;
    c->state = IN_HEAD;
    c->status = 0;
    c->began = now();
    send_request(c);
}

static void open_connection(struct client *c) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) {
        perror("connect");
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
    begin(c);
}

/* One byte of a head or a size line. */
static void line_byte(struct client *c, char byte) {
    if (c->have == MAX_HEAD - 1) {
        c->state = BAD;
        return;
    }
    c->head[c->have++] = byte;
    c->head[c->have] = 0;
    if (c->state == IN_HEAD) {
        if (c->have < 4 || memcmp(c->head + c->have - 4, "\r\n\r\n", 4))
            return;
        c->status = c->have > 12 ? atoi(c->head + 9) : 0;
        char *length = strcasestr(c->head, "\r\ncontent-length:");
        if (length) {
            c->left = strtoul(length + 17, NULL, 10);
            c->state = c->left ? IN_LENGTH : DONE;
        } else {
            c->state = strcasestr(c->head, "\r\ntransfer-encoding: chunked") ? IN_SIZE : BAD;
        }
    } else {
        if (byte != '\n')
            return;
        if (c->state == IN_SIZE) {
            c->left = strtoul(c->head, NULL, 16);
            c->state = c->left ? IN_CHUNK : IN_LAST;
        } else {
            c->state = c->state == IN_CHUNK_END ? IN_SIZE : DONE;
        }
    }
    c->have = 0;
}

static void consume(struct client *c, const char *data, size_t size) {
    while (size && c->state < DONE) {
        if (c->state != IN_LENGTH && c->state != IN_CHUNK) {
            line_byte(c, *data++);
            size--;
            continue;
        }
        size_t step = size < c->left ? size : c->left;
        c->payload += step;
        c->left -= step;
        data += step;
        size -= step;
        if (!c->left)
            c->state = c->state == IN_LENGTH ? DONE : IN_CHUNK_END;
    }
    if (size)
        c->state = BAD;
}

static void fail(struct client *c) {
    last_status = c->status == 200 ? 0 : c->status;
    errors++;
    close(c->fd);
    open_connection(c);
}

static void readable(struct client *c) {
    static char buffer[BUFFER];
    ssize_t got = recv(c->fd, buffer, BUFFER, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0 && c->state == DONE) { /* idle, and closed by the other side: no request is lost */
        close(c->fd);
        return;
    }
    if (got > 0)
        consume(c, buffer, (size_t)got);
    if (got <= 0 || c->state == BAD) {
        fail(c);
    } else if (c->state == DONE) {
        if (c->status != 200 || c->payload != expected) {
            fail(c);
        } else {
            latencies[answered++] = (float)((now() - c->began) * 1e6);
            begin(c);
        }
    }
}

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: load PORT CONNECTIONS REQUESTS BODY_BYTES DEADLINE_S < REQUEST\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    address = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    long connections = atol(argv[2]), requests = to_send = atol(argv[3]);
    expected = strtoul(argv[4], NULL, 10);
    request_size = fread(request, 1, sizeof request, stdin);
    session = memmem(request, request_size, "%SESSION%", 9);
    latencies = calloc((size_t)requests, sizeof *latencies);
    struct client *clients = calloc((size_t)connections, sizeof *clients);
    epoll = epoll_create1(0);
    double began = now(), deadline = began + atof(argv[5]);
    for (long i = 0; i < connections; i++)
        open_connection(&clients[i]);
    while (answered + errors < requests) {
        struct epoll_event events[256];
        int ready = epoll_wait(epoll, events, 256, 1000);
        for (int i = 0; i < ready; i++) {
            if (events[i].events & EPOLLOUT)
                send_request(events[i].data.ptr);
            if (events[i].events & ~(unsigned)EPOLLOUT)
                readable(events[i].data.ptr);
        }
        if (now() > deadline) {
            fprintf(stderr, "load: %ld of %ld requests after %s s\n", answered, requests, argv[5]);
            return 1;
        }
    }
    double seconds = now() - began;
    qsort(latencies, (size_t)answered, sizeof *latencies, ascending);
    printf("{\"seconds\": %.6f, \"requests\": %ld, \"errors\": %ld, \"p50_us\": %.1f, \"p99_us\": %.1f, \"status\": %d}\n",
           seconds, answered, errors, (double)(answered ? latencies[answered / 2] : 0),
           (double)(answered ? latencies[answered * 99 / 100] : 0), last_status);
    return 0;
}
